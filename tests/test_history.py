"""TokenHistory against lists made from scratch, and what the kernels make of them."""

import math

import pytest
import torch

from specdec_kernels.decoding import history
from specdec_kernels.decoding.history import TokenHistory
from specdec_kernels.ops import sample
from specdec_kernels.tree import SamplingParams

CPU = torch.device("cpu")


def lists(kept, b):
    """{token: (bias, count)} of a row, after checking its order and what its free places hold."""
    fields = kept.onto(SamplingParams.make(3))
    ids, counts = fields.token_ids[b].tolist(), fields.token_counts[b].tolist()
    bias = [0.0] * len(ids) if fields.token_bias is None else fields.token_bias[b].tolist()
    used = [i for i in ids if i != history.FREE]
    assert ids[: len(used)] == sorted(set(used)) and set(ids[len(used) :]) <= {history.FREE}
    assert set(counts[len(used) :]) <= {-1} and set(bias[len(used) :]) <= {0.0}
    return dict(zip(used, zip(bias, counts, strict=True), strict=False))


def from_scratch(prompt, new, bias):
    tokens = {*prompt, *new, *bias}
    return {t: (bias.get(t, 0.0), new.count(t) if t in new or t in prompt else -1) for t in tokens}


@pytest.mark.parametrize("bias", [{}, {3: 1.5, 40: -math.inf, 7: 0.25}], ids=["text", "biased"])
def test_lists_equal_those_made_from_scratch(bias, monkeypatch):
    monkeypatch.setattr(history, "GROWTH", 8)
    g = torch.Generator().manual_seed(0)
    prompts = [[5, 5, 9, 40], [], torch.randint(0, 60, (30,), generator=g).tolist()]
    kept, new = TokenHistory(prompts, bias, CPU), [[], [], []]
    for _ in range(40):
        for b in range(3):
            count = int(torch.randint(0, 4, (1,), generator=g)) * (b != 1 or len(new[1]) < 20)
            fresh = torch.randint(0, 90, (count,), generator=g).tolist()
            kept.push(b, fresh)
            new[b] += fresh
    for b in range(3):
        assert lists(kept, b) == from_scratch(prompts[b], new[b], bias)


def test_biases_alone_do_not_follow_the_text():
    kept = TokenHistory([[], []], {4: 2.0, 1: -math.inf}, CPU, counts=False)
    kept.push(0, [7, 8, 4])
    fields = kept.onto(SamplingParams.make(2))
    assert fields.token_counts is None
    assert fields.token_ids[:, :2].tolist() == [[1, 4]] * 2
    assert fields.token_bias[:, :2].tolist() == [[-math.inf, 2.0]] * 2


def test_the_kernel_reads_them():
    """Penalties over the prompt and the new tokens, equal to the formula on dense counts."""
    g = torch.Generator().manual_seed(1)
    prompts, new = [[1, 2, 3], [4, 60]], [[2, 2, 50], [4, 5, 6, 6, 6]]
    kept = TokenHistory(prompts, {9: 4.0}, CPU)
    for b, tokens in enumerate(new):
        kept.push(b, tokens)
    logits = torch.randn(2, 64, generator=g)
    sampling = SamplingParams.make(2, temperature=0.0)
    fields = dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    fields = {name: torch.full((2,), value) for name, value in fields.items()}
    expected = logits.clone()
    expected[:, 9] += 4.0
    for b in range(2):
        for token in {*prompts[b], *new[b]}:
            x = expected[b, token]
            expected[b, token] = (x * 1.5 if x < 0 else x / 1.5) - (
                (0.5 if token in new[b] else 0.0) + 0.25 * new[b].count(token)
            )
    for _ in range(12):  # the ranking, not the largest alone
        best = sample(logits, kept.onto(sampling)._replace(**fields))
        assert best.tolist() == expected.argmax(-1).tolist()
        for b, token in enumerate(best.tolist()):
            logits[b, token] = expected[b, token] = -math.inf


def test_a_step_makes_nothing_again():
    """Pushing writes into the tensors that are there, until they have to grow."""
    kept = TokenHistory([list(range(0, 300, 3))], {}, CPU)
    places = [f.data_ptr() for f in (kept._token_ids, kept._token_bias, kept._token_counts)]
    for token in range(1, 300, 3):
        kept.push(0, [token])
    fields = kept.onto(SamplingParams.make(1))
    assert [fields.token_ids.data_ptr(), fields.token_counts.data_ptr()] == [places[0], places[2]]
    kept.push(0, range(1000, 1100))
    assert len(lists(kept, 0)) == 300
