import math

import pytest
import torch
from helpers import BACKENDS
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    FALSE_ALARM,
    ToyModel,
    chi_square_pvalue,
    likely_children,
    poison,
    random_sampling,
    random_window,
)

from specdec_kernels.ops import _random
from specdec_kernels.ops.rejection_sample import reference, rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, DraftTree, SamplingParams

draw = torch.ops.specdec_kernels.sample.default  # takes the number of any stream
NATIVE = [b for b in BACKENDS if b != "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(8, t) for t in (1, 2, 33, 64, 65)] + [(111, 1), (111, 33), (111, 65)]
SIZES += [(32000, 2), (32000, 5), (50257, 2), (151936, 2)]


def settings_of(rows, **filters):
    return SamplingParams.make(rows, seed=range(rows), **filters)


def window_case(seed, dtype, vocab, width, batch=3, chain=False):
    """Target logits and a window that follows likely tokens."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, width, vocab, generator=g) * 2).to(dtype)
    ids, parents, num_nodes = random_window(g, batch, width, vocab, chain)
    ids = likely_children(g, ids, parents, logits.float().argmax(-1))
    return g, poison(logits, num_nodes), ids, parents, num_nodes


def assert_same(results, expected):
    for value, wanted in zip(results, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, width", SIZES)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_same_bits_as_reference(backend, dtype, vocab, width, rule):
    for seed in range(3 if vocab < 1000 else 1):
        g, logits, ids, parents, num_nodes = window_case(seed, dtype, vocab, width)
        args = (logits, ids, parents, num_nodes, random_sampling(g, 3, vocab))
        expected = rejection_sample(*args, rule=rule, backend="reference")
        assert_same(rejection_sample(*args, rule=rule, backend=backend), expected)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, width", [(8, 2), (8, 33), (111, 5), (32000, 3), (151936, 2)])
@pytest.mark.parametrize("mapped", [False, True])
def test_same_bits_with_draft_logits(backend, dtype, vocab, width, mapped):
    for seed in range(4 if vocab < 1000 else 1):
        g, logits, ids, parents, num_nodes = window_case(seed, dtype, vocab, width, chain=True)
        near = logits.float().nan_to_num(0.0) + torch.randn(logits.shape, generator=g) * 0.5
        vocab_map = None
        if mapped:
            vocab_map = torch.randperm(vocab + 2, generator=g)[: vocab - 3] - 1
            near = near[..., vocab_map.clamp(0, vocab - 1)]
        draft = poison(near.to(DTYPES[seed % 3]), (num_nodes - 1).clamp(min=0))
        sampling = random_sampling(g, 3, vocab)
        results = [
            rejection_sample(
                logits, ids, parents, num_nodes, sampling, rule="token", backend=b,
                draft_logits=draft, draft_vocab_map=vocab_map,
            )
            for b in ("reference", backend)
        ]  # fmt: skip
        assert_same(*results)


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
            ids.append(draw(logits[-1], *at[:6], stream))
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
    vocab, rows = (8, 8000) if backend in NATIVE else (4, 450)
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


def test_reference_takes_injected_uniforms():
    logits = torch.zeros(1, 2, 4)
    tree = DraftTree.from_lists([[0, 2]], [[-1, 0]])
    params = settings_of(1)[:6]
    for u, accepted in ((0.24, 1), (0.25, 0), (0.9, 0)):
        result = reference.rejection_sample(
            logits, *tree[:3], *params, None, None, "token",
            lambda seed, position, stream, count, u=u: torch.full((*seed.shape, count), u),
        )  # fmt: skip
        assert int(result.num_accepted) == accepted


class AcceptsOnEquality(reference.Node):
    """The faulty test u q <= p."""

    def against(self, slot, token, draft):
        if bool(self.coin(slot) * draft[token] <= 0) and not bool(self.kept[token]):
            return slot, token
        return super().against(slot, token, draft)


def impossible_draft():
    """Drafted tokens of probability 0 under the target, and 0 under the draft as well."""
    target = torch.zeros(50, 2, 8)
    target[..., 3] = -math.inf
    draft = torch.zeros(50, 2, 8)
    draft[..., 3] = -200.0
    ids = torch.tensor([[1, 3]]).expand(50, -1)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(50, -1)
    return target, ids, parents, torch.full((50,), 2, dtype=torch.int32), settings_of(50), draft


@pytest.mark.parametrize("backend", BACKENDS)
def test_probability_0_is_never_accepted(backend):
    *args, draft = impossible_draft()
    for options in ({"draft_logits": draft}, {}):
        result = rejection_sample(*args, rule="token", backend=backend, **options)
        assert not result.num_accepted.any()
        assert (result.output_token_ids[:, 0] != 3).all()
    result = rejection_sample(*args, rule="coupled", backend=backend)
    assert not result.num_accepted.any()


def test_negative_control_accepting_on_equality(monkeypatch):
    *args, draft = impossible_draft()
    monkeypatch.setattr(reference, "Node", AcceptsOnEquality)
    result = rejection_sample(*args, rule="token", draft_logits=draft, backend="reference")
    assert (result.output_token_ids[:, 0] == 3).all()


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
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_seed_alone_decides(backend, rule):
    """Batch order, padding slots, finished neighbours and threads change nothing."""
    g, logits, ids, parents, num_nodes = window_case(7, torch.float32, 9000, 6, batch=4)
    sampling = random_sampling(g, 4, 9000)
    expected = rejection_sample(
        logits, ids, parents, num_nodes, sampling, rule=rule, backend=backend
    )
    order = torch.tensor([2, 0, 3, 1])
    permuted = rejection_sample(
        logits[order], ids[order], parents[order], num_nodes[order],
        SamplingParams(*(x[order] for x in sampling)), rule=rule, backend=backend,
    )  # fmt: skip
    assert_same(permuted, [x[order] for x in expected])
    wider = rejection_sample(
        poison(torch.cat([logits, logits], 1), num_nodes), torch.cat([ids, ids], 1),
        torch.cat([parents, parents], 1), num_nodes, sampling, rule=rule, backend=backend,
    )  # fmt: skip
    assert torch.equal(wider.output_token_ids[:, :6], expected.output_token_ids)
    assert (wider.output_token_ids[:, 6:] == -1).all()
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            again = rejection_sample(
                logits, ids, parents, num_nodes, sampling, rule=rule, backend=backend
            )
            assert_same(again, expected)
    finally:
        torch.set_num_threads(threads)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_rows(backend):
    """NaN and empty rows decide by the fallback, and set the status where they decided."""
    target = torch.zeros(4, 2, 6)
    target[0, 0, 2], target[0, 0, 4] = math.nan, 1.0
    target[1, 0] = -math.inf
    target[2, 1] = math.nan  # behind a rejected draft: not needed
    target[2, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.inf, 0.0])
    target[3, 0, 4] = math.inf
    tree = DraftTree.from_lists([[0, 4], [0, 0], [0, 4], [0, 4]], [[-1, 0]] * 4)
    draft = torch.zeros(4, 2, 6)
    for rule, options in (("coupled", {}), ("token", {}), ("token", {"draft_logits": draft})):
        result = rejection_sample(
            target, *tree[:3], settings_of(4), rule=rule, backend=backend, **options
        )
        assert result.num_accepted.tolist() == [1, 1, 0, 1], (rule, options)
        assert result.output_token_ids[:, 0].tolist()[:2] == [4, 0]
        assert result.status.tolist() == [STATUS_NAN, STATUS_EMPTY, 0, 0]
    draft[0], draft[1] = math.nan, -math.inf
    result = rejection_sample(
        torch.zeros(4, 2, 6), *tree[:3], settings_of(4), rule="token", draft_logits=draft,
        backend=backend,
    )  # fmt: skip
    assert result.num_accepted[:2].tolist() == [0, 0]
    assert result.status.tolist() == [STATUS_NAN, STATUS_EMPTY, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_distributions_always_accept(backend):
    """max(p - q, 0) is empty; a draft from elsewhere samples the target."""
    target = torch.randn(80, 2, 8, generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(80, -1)
    counts = torch.full((80,), 2, dtype=torch.int32)
    for drafted, accepted in ((3, 1), (-1, 0), (8, 0), (2**40, 0)):
        ids = torch.tensor([[0, drafted]]).expand(80, -1)
        result = rejection_sample(
            target, ids, parents, counts, settings_of(80), draft_logits=target, rule="token",
            backend=backend,
        )  # fmt: skip
        assert (result.num_accepted == accepted).all()
        assert (result.output_token_ids[:, 0] < 8).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_temperature_0_equals_verify_greedy(backend, rule):
    _, logits, ids, parents, num_nodes = window_case(3, torch.bfloat16, 111, 9)
    sampling = settings_of(3, temperature=0.0, top_k=3)
    args = (logits, ids, parents, num_nodes)
    result = rejection_sample(*args, sampling, rule=rule, backend=backend)
    assert_same(result, verify_greedy(*args, backend=backend))


special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 3e38, -3e38])
number = st.floats(-8, 8, width=32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(number, special), min_size=1, max_size=20),
    st.lists(st.one_of(number, number, special), min_size=1, max_size=20),
    st.integers(0, 10**6),
)
def test_fuzz_against_reference(values, draft_values, seed):
    g = torch.Generator().manual_seed(seed)
    vocab = len(values)
    for chain in (False, True):
        ids, parents, num_nodes = random_window(g, 3, 4, vocab, chain)
        rows = torch.tensor(values)[torch.randperm(vocab, generator=g)]
        target = rows.expand(3, 4, -1)
        draft = torch.tensor(draft_values).expand(3, 4, -1) if chain else None
        sampling = random_sampling(g, 3, vocab)
        for rule in ("token",) if chain else ("coupled", "token"):
            expected, *others = [
                rejection_sample(
                    target, ids, parents, num_nodes, sampling, draft_logits=draft, rule=rule,
                    backend=b,
                )
                for b in ["reference", *NATIVE]
            ]  # fmt: skip
            emitted = expected.output_token_ids >= 0
            assert torch.equal(emitted.any(-1), num_nodes > 0)
            assert (expected.output_token_ids < vocab).all()
            for other in others:
                assert_same(other, expected)


def test_errors_name_the_argument():
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    args = (logits, ids, parents, torch.full((2,), 3, dtype=torch.int32), settings_of(2))
    for rule in ("recursive", "block", "x"):
        with pytest.raises(ValueError, match=f"rule as one of coupled, token, got '{rule}'"):
            rejection_sample(*args, rule=rule)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"expected chains.*'recursive' is the one for trees"):
            rejection_sample(*args, draft_logits=logits, rule="token", backend=backend)
    with pytest.raises(ValueError, match=r"expected draft_logits \[B, T, Vd\].*got \[2, 2, 5\]"):
        rejection_sample(*args, draft_logits=logits[:, :2], rule="token")
    with pytest.raises(ValueError, match="expected draft_logits with draft_vocab_map"):
        rejection_sample(*args, draft_vocab_map=ids[0], rule="token")
    with pytest.raises(ValueError, match=r"expected draft_vocab_map \[Vd\].*got \[3\]"):
        rejection_sample(*args, draft_logits=logits, draft_vocab_map=ids[0], rule="token")
    with pytest.raises(TypeError, match=r"expected sampling.temperature as float32, got float64"):
        wrong = args[4]._replace(temperature=args[4].temperature.double())
        rejection_sample(*args[:4], wrong, rule="coupled")


def test_opcheck_and_compile():
    _, logits, ids, parents, num_nodes = window_case(0, torch.float32, 111, 5, chain=True)
    sampling = settings_of(3, top_p=0.9)
    draft = torch.zeros(3, 5, 111)
    op = torch.ops.specdec_kernels.rejection_sample.default
    torch.library.opcheck(
        op, (logits, ids, parents, num_nodes, *sampling[:6], draft, None, "token")
    )
    args = (logits, ids, parents, num_nodes, sampling)
    compiled = torch.compile(rejection_sample, fullgraph=True)
    assert_same(
        compiled(*args, draft_logits=draft, rule="token"),
        rejection_sample(*args, draft_logits=draft, rule="token"),
    )
