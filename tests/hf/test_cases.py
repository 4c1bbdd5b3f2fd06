"""Faults that users of comparable systems met, as scenarios; each test names its cases."""

import pytest
import torch
from tiny import (
    VOCAB,
    accelerated,
    batch,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    random_rows,
    use_drafter,
    wrong,
)


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


def accepted_each_step(monkeypatch):
    """The accepted draft tokens of every step, row by row, cut where a row ends."""
    from specdec_kernels.metrics import Metrics

    steps, original = [], Metrics.record_row

    def record_row(self, num_draft_tokens, num_accepted):
        steps.append(num_accepted)
        original(self, num_draft_tokens, num_accepted)

    monkeypatch.setattr(Metrics, "record_row", record_row)
    return steps


@pytest.mark.parametrize("k", range(1, 7))
def test_a26_wrong_at_exactly_one_position(model, k, monkeypatch):
    """Accepted is j in every round, whichever position j is the wrong one, the last one too."""
    prompts = random_rows((9,), seed=3)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs)
    steps = accepted_each_step(monkeypatch)
    for j in range(k):
        future = future_of(prompts, expected)

        def plan(b, text, j=j, future=future):
            chain = future(b, text)[:k]
            return [[wrong(t) if i == j else t for i, t in enumerate(chain)]]

        use_drafter(monkeypatch, plan)
        steps.clear()
        with accelerated(model, num_speculative_tokens=k):
            assert new_tokens(model, inputs) == expected
        whole = (48 - 1 - k) // (j + 1)
        assert steps[:whole] == [j] * whole


@pytest.fixture(scope="module")
def long_text(model):
    return new_tokens(model, batch([[10]]), max_new_tokens=200)


@pytest.mark.parametrize("k", [1, 4, 20])
def test_b01_a_prompt_of_one_token(model, long_text, k, monkeypatch):
    """200 tokens; drafts that are all right, mostly wrong, and looked up."""
    prompts, expected = [[10]], long_text
    inputs = batch(prompts)
    options = dict(max_new_tokens=200)
    with accelerated(model, num_speculative_tokens=k) as metrics:
        assert new_tokens(model, inputs, **options) == expected
    assert metrics.num_steps >= 3
    future = future_of(prompts, expected)
    use_drafter(monkeypatch, lambda b, text: [future(b, text)[:k]])
    with accelerated(model, num_speculative_tokens=k) as metrics:
        assert new_tokens(model, inputs, **options) == expected
    assert metrics.acceptance_rate == 1.0 and metrics.num_steps == -(-199 // (k + 1))
    use_drafter(monkeypatch, lambda b, text: [[(7 * text[-1] + i) % VOCAB for i in range(k)]])
    with accelerated(model, num_speculative_tokens=k) as metrics:
        assert new_tokens(model, inputs, **options) == expected
    assert metrics.acceptance_rate < 0.5


def test_b05_b14_b22_rounds_of_every_kind(model, monkeypatch):
    """A tree, no draft, a chain that goes wrong, a chain that holds: acceptance never decays."""
    prompts = random_rows((4, 11), seed=5)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs, max_new_tokens=120)
    future = future_of(prompts, expected)
    rounds = [0]

    def plan(b, text):
        rounds[0] += b == 0
        f = future(b, text)[:4]
        kind = rounds[0] % 4
        if kind == 0 and f:
            return [[wrong(f[0]), 5], [f[0], wrong(f[0])], f]
        return [[], [wrong(t) for t in f], f][kind - 1 : kind]

    use_drafter(monkeypatch, plan)
    steps = accepted_each_step(monkeypatch)
    with accelerated(model, num_speculative_tokens=9):
        assert new_tokens(model, inputs, max_new_tokens=120) == expected
    assert steps[: 4 * 2 * 6] == [0, 0, 0, 0, 4, 4, 4, 4] * 6


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_b15_padded_rows_equal_their_solo_runs(name):
    model = fresh(name)
    rows = lookup_rows(model, lens=(3, 9, 20))
    solo = [new_tokens(model, batch([row]))[0] for row in rows]
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, batch(rows)) == solo
    assert metrics.num_accepted_tokens > 0


def test_a06_c07_rows_with_drafts_of_different_lengths(model, monkeypatch):
    """0, 1, 3 and 5 drafted tokens side by side, the row that has none changing every step."""
    prompts = random_rows((3, 6, 9, 12), seed=7)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs)
    future = future_of(prompts, expected)
    calls = iter(range(10_000))

    def plan(b, text):
        return [future(b, text)[: (0, 1, 3, 5)[(b + next(calls) // 4) % 4]]]

    drafter = use_drafter(monkeypatch, plan)
    with accelerated(model, num_speculative_tokens=5) as metrics:
        assert new_tokens(model, inputs) == expected
    assert sorted(drafter.sizes[0]) == [0, 1, 3, 5] and drafter.sizes[0] != drafter.sizes[1]
    assert metrics.acceptance_rate == 1.0


def test_c07_only_one_row_matches(model):
    """Lookup in a batch: a row without a match gets no draft of another row or of the last step."""
    rows = [random_rows((12,), seed=9)[0], [5, 6, 7, 8] * 4, random_rows((7,), seed=10)[0]]
    expected = new_tokens(model, batch(rows))
    with accelerated(model, num_speculative_tokens=4):
        assert new_tokens(model, batch(rows)) == expected


GARBAGE = {
    "c10 the same token for ever": lambda b, text: [[3] * 6],
    "c21 always wrong": None,
    "c21 the rejected token again": lambda b, text: [[text[-1]] * 6],
    "siblings that are all the same": lambda b, text: [[9, 9, 9], [9, 9, 8], [8]],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_drafts_make_progress(model, name, monkeypatch):
    """C10, C21: every round commits a token, so there are no more rounds than tokens."""
    prompts = random_rows((5, 9, 2), seed=11)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs, max_new_tokens=24)
    future = future_of(prompts, expected)
    plan = GARBAGE[name] or (lambda b, text: [[wrong(t) for t in future(b, text)[:6]]])
    use_drafter(monkeypatch, plan)
    for size in (6, None):
        with accelerated(model, num_speculative_tokens=size) as metrics:
            assert new_tokens(model, inputs, max_new_tokens=24) == expected
        assert metrics.num_steps <= 23
        assert metrics.num_new_tokens == 3 * 24


def test_c21_equal_logits(monkeypatch):
    """With every logit the same, the lowest id wins, in plain and here."""
    model = fresh("llama")
    model.lm_head.weight.data.zero_()
    inputs = batch(random_rows((5, 9)))
    expected = new_tokens(model, inputs)
    use_drafter(monkeypatch, lambda b, text: [[1, 0], [0, 0, 1]])
    with accelerated(model, num_speculative_tokens=5):
        assert new_tokens(model, inputs) == expected == [[0] * 48] * 2


def test_c22_drafts_of_nothing_but_eos(model, monkeypatch):
    prompts = random_rows((5, 9), seed=12)
    inputs = batch(prompts)
    texts = new_tokens(model, inputs)
    never = next(t for t in range(2, VOCAB) if all(t not in text for text in texts))
    future = future_of(prompts, texts)
    plans = [
        lambda b, text: [[never] * 6],
        lambda b, text: [x for i in range(4) for x in ([*future(b, text)[:i], never],)],
    ]
    for plan in plans:
        use_drafter(monkeypatch, plan)
        with accelerated(model, num_speculative_tokens=7):
            assert new_tokens(model, inputs, eos_token_id=never) == texts


def test_d13_metrics_after_an_eos(model, monkeypatch):
    """EOS as the third of six accepted tokens: what came behind it is not counted."""
    prompts = random_rows((9,), seed=13)
    inputs = batch(prompts)
    texts = new_tokens(model, inputs)[0]
    pos = next(i for i in range(3, 8) if texts[i] not in texts[:i])
    use_drafter(monkeypatch, lambda b, text: [future_of(prompts, [texts])(b, text)[:12]])
    with accelerated(model, num_speculative_tokens=12) as metrics:
        out = new_tokens(model, inputs, eos_token_id=texts[pos])
    assert out == [texts[: pos + 1]]
    assert metrics.num_new_tokens == pos + 1
    assert metrics.num_accepted_tokens == pos and metrics.num_steps == 1
    assert metrics.accepted_per_position == [1] * pos
    assert 0 < metrics.acceptance_rate <= 1


def test_c10_many_sequences_that_come_and_go(model, monkeypatch):
    """Runs of random sizes one after the other on one patched model, drafts partly garbage."""
    g = torch.Generator().manual_seed(0)
    prompts = random_rows(tuple(torch.randint(1, 20, (24,), generator=g).tolist()), seed=14)
    texts = [new_tokens(model, batch([p]), max_new_tokens=20)[0] for p in prompts]
    with accelerated(model, num_speculative_tokens=4):
        start = 0
        for size in (1, 5, 2, 8, 3, 5):
            part = slice(start, start + size)
            use_drafter(
                monkeypatch,
                lambda b, text, part=part: [
                    [*future_of(prompts[part], texts[part])(b, text)[:2], 7, 7]
                ],
            )
            eos = texts[start][11]
            kept = [t[: t.index(eos) + 1] if eos in t else t for t in texts[part]]
            out = new_tokens(model, batch(prompts[part]), max_new_tokens=20, eos_token_id=eos)
            assert [row[: len(k)] for row, k in zip(out, kept, strict=True)] == kept
            start += size


@pytest.mark.parametrize("k", [1, 4])
def test_long_runs_over_reallocations(k, monkeypatch):
    """The K/V storage and the token buffer grow several times within one run."""
    monkeypatch.setattr("specdec_kernels.cache.GROWTH", 8)
    monkeypatch.setattr("specdec_kernels.decoding.rows.GROWTH", 8)
    model = fresh("mistral")
    rows = lookup_rows(model)
    expected = new_tokens(model, batch(rows), max_new_tokens=150)
    with accelerated(model, num_speculative_tokens=k):
        assert new_tokens(model, batch(rows), max_new_tokens=150) == expected


def test_unwritten_memory_is_never_read(model, monkeypatch):
    """A06: slots behind a row's prefix hold NaN until they are written."""
    original = torch.Tensor.new_empty

    def new_nan(self, *size, **options):
        out = original(self, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    rows = lookup_rows(model)
    inputs = batch(rows)
    eos = new_tokens(model, inputs)[1][7]
    expected = new_tokens(model, inputs, eos_token_id=eos)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    with accelerated(model, num_speculative_tokens=8):
        assert new_tokens(model, inputs, eos_token_id=eos) == expected
