"""Bias, penalties, suppressed tokens and masks, in `sample` and at every node of a tree."""

import math

import pytest
import torch
from helpers import backends
from sampling_cases import random_edits, random_sampling, random_window, rows_for, too_long
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, SamplingParams

BACKENDS = backends("rejection_sample")

NATIVE = [b for b in BACKENDS if b != "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def history(prompt, generated, bias=None, size=None):
    """One row of token_ids, token_bias and token_counts."""
    bias = bias or {}
    ids = sorted({*prompt, *generated, *bias})
    in_text = {*prompt, *generated}
    ids += [-1] * ((size or len(ids)) - len(ids))
    return (
        torch.tensor(ids),
        torch.tensor([float(bias.get(t, 0.0)) for t in ids]),
        torch.tensor([generated.count(t) if t in in_text else -1 for t in ids], dtype=torch.int32),
    )


def edited(sampling, rows, **penalties):
    """Sampling with the histories of `rows` (prompt, generated, bias)."""
    size = max(len({*p, *g, *b}) for p, g, b in rows)
    fields = [torch.stack(x) for x in zip(*(history(*row, size) for row in rows), strict=True)]
    values = {k: torch.full((len(rows),), v) for k, v in penalties.items()}
    names = ("token_ids", "token_bias", "token_counts")
    return sampling._replace(**dict(zip(names, fields, strict=True)), **values)


def by_hand(logits, prompt, generated, bias, repetition=1.0, presence=0.0, frequency=0.0):
    """The processors as one would write them for one row [V], token by token."""
    logits = logits.float().clone()
    for token, value in bias.items():
        logits[token] = -math.inf if value == -math.inf else logits[token] + value
    for token in {*prompt, *generated}:
        x = logits[token]
        logits[token] = x * repetition if x < 0 else x / repetition
    for token in set(generated):
        logits[token] -= torch.tensor(frequency) * generated.count(token)
        logits[token] -= torch.tensor(presence)
    return logits


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 3, 31, 32, 33, 111, 1000, 32000, 50257])
def test_same_bits_as_reference(backend, dtype, vocab):
    if too_long(backend, vocab, dtype):
        pytest.skip("tested in another dtype")
    g = torch.Generator().manual_seed(vocab)
    rows = rows_for(backend, 40, 5) if vocab <= 1000 else rows_for(backend, 4, 1)
    for _ in range(3):
        logits = (torch.randn(rows, vocab, generator=g) * 3).to(dtype)
        sampling = random_edits(g, random_sampling(g, rows, vocab), vocab, None)
        expected = sample(logits, sampling, backend="reference")
        assert torch.equal(sample(logits, sampling, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_node_sees_its_own_ancestors(backend):
    """Against the edits of each node's whole text, written out by hand."""
    g = torch.Generator().manual_seed(5)
    vocab, width, penalties = 24, 9, dict(repetition=1.7, presence=0.4, frequency=0.3)
    for seed in range(rows_for(backend, 6, 1)):
        logits = torch.randn(3, width, vocab, generator=g) * 3
        ids, parents, num_nodes = random_window(g, 3, width, vocab)
        ids = ids.clamp(0, vocab - 1)
        texts = [
            (torch.randint(0, vocab, (6,), generator=g).tolist(),
             torch.randint(0, vocab, (5,), generator=g).tolist(),
             {3: -2.5, 7: -math.inf, 11: 1.5})
            for _ in range(3)
        ]  # fmt: skip
        expected = logits.clone()
        for b in range(3):
            paths = {0: []}
            for slot in range(1, int(num_nodes[b])):
                paths[slot] = [*paths[int(parents[b, slot])], int(ids[b, slot])]
            for slot, path in paths.items():
                prompt, generated, bias = texts[b]
                expected[b, slot] = by_hand(
                    logits[b, slot], prompt, [*generated, *path], bias, **penalties
                )
        for temperature in (0.0, 0.8):
            plain = SamplingParams.make(3, temperature=temperature, seed=seed, position=9)
            inside = edited(plain, texts, **{f"{k}_penalty": v for k, v in penalties.items()})
            for rule in ("coupled", "recursive"):
                got = rejection_sample(
                    logits, ids, parents, num_nodes, inside, rule=rule, backend=backend
                )
                wanted = rejection_sample(
                    expected, ids, parents, num_nodes, plain, rule=rule, backend=backend
                )
                assert torch.equal(got.output_token_ids, wanted.output_token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_processors_of_transformers(backend):
    g = torch.Generator().manual_seed(1)
    count = rows_for(backend, 50, 12)
    logits = torch.randn(count, 200, generator=g) * 3
    text = torch.randint(0, 200, (count, 30), generator=g)
    bias = {(5,): 2.0, (17,): -1.5, (60,): -math.inf}
    processed = RepetitionPenaltyLogitsProcessor(1.7)(
        text, SequenceBiasLogitsProcessor(bias)(text, logits.clone())
    )
    sampling = SamplingParams.make(count, seed=range(count), temperature=0.9)
    rows = [(row[:20], row[20:], {k[0]: v for k, v in bias.items()}) for row in text.tolist()]
    got = sample(logits, edited(sampling, rows, repetition_penalty=1.7), backend=backend)
    assert torch.equal(got, sample(processed, sampling, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_and_masked_tokens_never_come(backend, temperature):
    rows, vocab = rows_for(backend, 300, 12), 70
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    logits[:, 4], logits[:, 69] = 90.0, 50.0
    sampling = SamplingParams.make(rows, seed=range(rows), temperature=temperature)
    no_four = sampling._replace(
        token_ids=torch.tensor([[4]]).expand(rows, -1),
        token_bias=torch.full((rows, 1), -math.inf),
    )
    assert (sample(logits, sampling, backend=backend) == 4).all()
    assert (sample(logits, no_four, backend=backend) == 69).all()
    words = torch.zeros(rows, 3, dtype=torch.int32)
    words[:, 0], words[:, 1] = 0b1011, -(2**31)  # tokens 0, 1, 3 and 63
    masked = sample(logits, sampling._replace(allowed_tokens=words), backend=backend)
    assert torch.isin(masked, torch.tensor([0, 1, 3, 63])).all()
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows, -1)
    ids = torch.tensor([[0, 4]]).expand(rows, -1)
    two = torch.full((rows,), 2, dtype=torch.int32)
    for rule in ("coupled", "recursive", "block", "typical"):
        result = rejection_sample(
            logits[:, None].expand(-1, 2, -1), ids, parents, two, no_four, rule=rule,
            backend=backend,
        )  # fmt: skip
        assert not result.num_accepted.any()
        assert (result.output_token_ids[:, 0] == 69).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_that_allows_nothing(backend):
    """Token 0 and the status; NaN behind the mask is not seen."""
    logits = torch.full((2, 1, 40), math.nan)
    logits[:, :, 33] = 1.0
    sampling = SamplingParams.make(2)._replace(allowed_tokens=torch.zeros(2, 1, 2).int())
    sampling.allowed_tokens[1, 0, 1] = 2
    roots = torch.zeros(2, 1, dtype=torch.int64)
    args = (logits, roots, torch.full((2, 1), -1).int(), torch.ones(2).int())
    result = rejection_sample(*args, sampling, rule="coupled", backend=backend)
    assert result.output_token_ids.tolist() == [[0], [33]]
    assert result.status.tolist() == [STATUS_EMPTY, 0]
    plain = rejection_sample(*args, SamplingParams.make(2), rule="coupled", backend=backend)
    assert plain.status.tolist() == [STATUS_NAN] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_and_unordered_ids_add_up(backend):
    rows = rows_for(backend, 400, 90)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).expand(rows, -1)
    seeds = SamplingParams.make(rows, seed=range(rows))

    def drawn(ids, bias, counts):
        sampling = seeds._replace(
            token_ids=torch.tensor([ids]).expand(rows, -1),
            token_bias=torch.tensor([bias]).expand(rows, -1),
            token_counts=torch.tensor([counts], dtype=torch.int32).expand(rows, -1),
            frequency_penalty=torch.full((rows,), 0.5),
            repetition_penalty=torch.full((rows,), 1.5),
        )
        return sample(logits, sampling, backend=backend)

    once = drawn([3, 9, 20], [1.5, 0.25, -1.0], [3, 0, 2])
    assert torch.equal(drawn([20, -1, 3, 9, 3, 77], [-1.0, 9.0, 1.0, 0.25, 0.5, 9.0],
                             [2, 5, 1, 0, 2, 5]), once)  # fmt: skip
    assert not torch.equal(drawn([3, 9, 20], [1.5, 0.25, -1.0], [0, 0, 2]), once)


def test_errors_name_the_field():
    logits, sampling = torch.zeros(2, 40), SamplingParams.make(2)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for fields, error, message in (
        (dict(token_bias=torch.zeros(2, 3)), ValueError, "token_ids with sampling.token_bias"),
        (dict(token_ids=ids.int()), TypeError, "sampling.token_ids as int64, got int32"),
        (dict(token_ids=ids, token_bias=torch.zeros(2, 4)), ValueError, "sampling.token_bias"),
        (dict(token_ids=ids, token_counts=ids), TypeError, "sampling.token_counts as int32"),
        (dict(repetition_penalty=torch.ones(3)), ValueError, "sampling.repetition_penalty"),
        (dict(allowed_tokens=torch.zeros(2, 1).int()), ValueError, "sampling.allowed_tokens"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            sample(logits, sampling._replace(**fields))
