"""rejection_sample as a distribution: decoding a toy model for several steps, by enumeration."""

import math

import pytest
import torch
from helpers import BACKENDS
from sampling_cases import FALSE_ALARM, ToyModel, chi_square_pvalue

from specdec_kernels.ops import _random
from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import SamplingParams

draw = torch.ops.specdec_kernels.sample.default  # takes the number of any stream
NATIVE = [b for b in BACKENDS if b != "reference"]


def settings_of(rows, **filters):
    return SamplingParams.make(rows, seed=range(rows), **filters)


class Decoder:
    """Speculative decoding of a toy model, vectorised over rows, until each has three tokens."""

    def __init__(self, vocab, rows, *, temperature=0.8, verify=rejection_sample, **options):
        self.target, self.draft = ToyModel(vocab, 1), ToyModel(vocab, 2)
        self.draft.table = self.target.table * 0.6 + self.draft.table * 0.4
        self.temperature, self.verify, self.options = temperature, verify, options
        self.rows, self.vocab = rows, vocab
        self.contexts = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.context = self.contexts[torch.arange(rows) % 3]

    def tree_window(self, before, last, sampling):
        """Deterministic: the draft model's two best at the root, its best below each."""
        first = self.draft.logits(before, last).topk(2).indices
        second = [self.draft.logits(last, first[:, i]).argmax(-1) for i in (0, 1)]
        ids = torch.stack([last, first[:, 0], first[:, 1], *second], 1)
        parents = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
        before_of = torch.stack([before, last, last, first[:, 0], first[:, 1]], 1)
        return ids, parents, before_of, None

    def chain_window(self, before, last, sampling, stream=_random.DRAFT):
        """Two tokens drawn from the draft model."""
        ids, before_of, logits = [last], [before], []
        for i in range(2):
            logits.append(self.draft.logits(before_of[-1], ids[-1]))
            at = sampling._replace(
                temperature=torch.ones(self.rows), position=sampling.position + i
            )
            before_of.append(ids[-1])
            ids.append(draw(logits[-1], *at, stream))
        logits.append(torch.full_like(logits[0], math.nan))
        parents = torch.tensor([-1, 0, 1], dtype=torch.int32)
        return torch.stack(ids, 1), parents, torch.stack(before_of, 1), torch.stack(logits, 1)

    def run(self, window, **window_options):
        """The first three tokens of each row, [rows, 3]."""
        text = torch.cat([self.context, torch.full((self.rows, 8), -1)], 1)
        length = torch.full((self.rows,), 2)
        everyone = torch.arange(self.rows)
        while int(length.min()) < 5:
            before, last = text[everyone, length - 2], text[everyone, length - 1]
            sampling = settings_of(self.rows, temperature=self.temperature, position=length)
            ids, parents, before_of, draft = window(before, last, sampling, **window_options)
            active = (length < 5).int() * ids.shape[1]
            logits = self.target.logits(before_of, ids)
            result = self.verify(
                logits, ids, parents.expand(self.rows, -1).contiguous(), active.int(), sampling,
                draft_logits=draft, **self.options,
            )  # fmt: skip
            for i in range(ids.shape[1]):
                emits = result.output_token_ids[:, i] >= 0
                text[everyone[emits], length[emits] + i] = result.output_token_ids[emits, i]
            length = length + (result.output_token_ids >= 0).sum(-1)
        return text[:, 2:5]

    def pvalue(self, tokens):
        """Of (context, three tokens) against the exact joint distribution."""
        cells = (torch.arange(self.rows) % 3) * self.vocab**3
        for i in range(3):
            cells = cells + tokens[:, i] * self.vocab ** (2 - i)
        joint = [self.target.joint(*c.tolist(), self.temperature).flatten() for c in self.contexts]
        counts = torch.bincount(cells, minlength=3 * self.vocab**3)
        return chi_square_pvalue(counts, torch.cat(joint) / 3)


def decoder_for(backend, **options):
    # The reference walks row by row in Python; it draws the same bits on a smaller case.
    vocab, rows = (8, 30000) if backend in NATIVE else (4, 450)
    return Decoder(vocab, rows, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_joint_of_three_tokens_on_trees(backend, rule):
    decoder = decoder_for(backend, rule=rule)
    assert decoder.pvalue(decoder.run(decoder.tree_window)) > FALSE_ALARM


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_joint_of_three_tokens_on_sampled_chains(backend, rule):
    decoder = decoder_for(backend, rule=rule)
    assert decoder.pvalue(decoder.run(decoder.chain_window)) > FALSE_ALARM


@pytest.mark.parametrize("backend", NATIVE)
def test_negative_control_wrong_draft_probabilities(backend):
    def verify(*args, draft_logits, **kwargs):
        return rejection_sample(*args, draft_logits=draft_logits * 0.7, **kwargs)

    decoder = decoder_for(backend, rule="token", verify=verify)
    assert decoder.pvalue(decoder.run(decoder.chain_window)) < FALSE_ALARM


@pytest.mark.parametrize("backend", NATIVE)
def test_joint_with_sampled_drafts_taken_for_one_hot(backend):
    """Leaving draft_logits out accepts less, and stays exact."""

    def verify(*args, draft_logits, **kwargs):
        return rejection_sample(*args, **kwargs)

    decoder = decoder_for(backend, rule="token", verify=verify)
    assert decoder.pvalue(decoder.run(decoder.chain_window)) > FALSE_ALARM


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("stream", [_random.RESIDUAL, _random.ACCEPT])
def test_negative_control_shared_noise(backend, stream):
    """Drafts drawn with the very numbers that verification uses."""
    decoder = decoder_for(backend, rule="token")
    tokens = decoder.run(decoder.chain_window, stream=stream)
    assert decoder.pvalue(tokens) < FALSE_ALARM


@pytest.mark.parametrize("backend", NATIVE)
def test_acceptance_rate_and_recovered_tokens(backend):
    """P(accept) = sum min(p, q), and given a rejection the token is norm(max(p - q, 0))."""
    rows, vocab = 60000, 8
    g = torch.Generator().manual_seed(9)
    target, draft = torch.randn(2, vocab, generator=g) * 1.5
    p, q = torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)
    sampling = settings_of(rows, position=5)
    ids = torch.zeros(rows, 2, dtype=torch.int64)
    ids[:, 1] = sample(draft.expand(rows, -1), sampling, stream="draft")
    parents = torch.tensor([-1, 0], dtype=torch.int32).expand(rows, -1)
    result = rejection_sample(
        target.expand(rows, 2, -1), ids, parents, torch.full((rows,), 2, dtype=torch.int32),
        sampling, draft_logits=draft.expand(rows, 2, -1), rule="token", backend=backend,
    )  # fmt: skip
    accepted = result.num_accepted == 1
    rate = torch.minimum(p, q).sum()
    counts = torch.stack([accepted.sum(), (~accepted).sum()])
    assert chi_square_pvalue(counts, torch.stack([rate, 1 - rate])) > FALSE_ALARM
    recovered = result.output_token_ids[~accepted, 0].bincount(minlength=vocab)
    residual = (p - q).clamp(min=0)
    assert chi_square_pvalue(recovered, residual / residual.sum()) > FALSE_ALARM
    assert torch.equal(result.output_token_ids[accepted, 0], ids[accepted, 1])
    bonus = result.output_token_ids[accepted, 1].bincount(minlength=vocab)
    assert chi_square_pvalue(bonus, p) > FALSE_ALARM


@pytest.mark.parametrize("backend", NATIVE)
def test_one_hot_siblings(backend):
    """Each sibling is accepted with exactly its own probability, in any order, duplicates too."""
    rows, vocab = 60000, 8
    target = torch.randn(vocab, generator=torch.Generator().manual_seed(11))
    p = torch.softmax(target.double(), -1)
    ids = torch.tensor([[0, 5, 2, 5, 9, 6]]).expand(rows, -1)
    parents = torch.tensor([[-1, 0, 0, 0, 0, 0]], dtype=torch.int32).expand(rows, -1)
    result = rejection_sample(
        target.expand(rows, 6, -1), ids, parents, torch.full((rows,), 6, dtype=torch.int32),
        settings_of(rows), rule="token", backend=backend,
    )  # fmt: skip
    tokens = result.output_token_ids[:, 0]
    assert chi_square_pvalue(tokens.bincount(minlength=vocab), p) > FALSE_ALARM
    drafted = torch.isin(tokens, torch.tensor([5, 2, 6]))
    assert torch.equal(result.num_accepted == 1, drafted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_coupled_seed_gives_the_text_of_undrafted_sampling(backend):
    """Whatever the drafter and the tree."""
    rows = 200
    decoder = Decoder(8, rows, rule="coupled", backend=backend)
    text = decoder.context
    for i in range(3):
        logits = decoder.target.logits(text[:, -2], text[:, -1])
        at = settings_of(rows, temperature=decoder.temperature, position=2 + i)
        text = torch.cat([text, sample(logits, at, backend=backend)[:, None]], 1)
    assert torch.equal(decoder.run(decoder.tree_window), text[:, 2:])
    assert torch.equal(decoder.run(decoder.chain_window), text[:, 2:])
