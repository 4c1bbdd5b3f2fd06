import math

import pytest
import torch
from helpers import backends
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    likely_children,
    poison,
    random_edits,
    random_sampling,
    random_window,
    rows_for,
    too_long,
)

from specdec_kernels.ops.rejection_sample import reference, rejection_sample
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, DraftTree, SamplingParams

BACKENDS = backends("rejection_sample")

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


def seeds_for(backend, dtype, vocab, width, seeds):
    """Seeds of a test of bits, none where the interpreter would take too long."""
    if backend != "triton":
        return range(seeds)
    large = (vocab > 8 and width > 9) or (vocab > 1000 and width > 3)
    if large or too_long(backend, vocab + width, dtype):
        pytest.skip("too long for the interpreter")
    return range(1, 2) if width > 9 or vocab > 1000 else range(2)


def assert_same(results, expected):
    for value, wanted in zip(results, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, width", SIZES)
@pytest.mark.parametrize("rule", ["coupled", "recursive", "block", "typical"])
def test_same_bits_as_reference(backend, dtype, vocab, width, rule):
    if backend == "triton" and width > 9 and (width == 64) != (rule in ("block", "typical")):
        pytest.skip("too long for the interpreter")
    for seed in seeds_for(backend, dtype, vocab, width, 4 if vocab < 1000 else 2):
        g, logits, ids, parents, num_nodes = window_case(
            seed, dtype, vocab, width, chain=rule == "block"
        )
        sampling = random_sampling(g, 3, vocab)
        if seed % 2:
            sampling = random_edits(g, sampling, vocab, width)
        args = (logits, ids, parents, num_nodes, sampling)
        expected = rejection_sample(*args, rule=rule, backend="reference")
        assert_same(rejection_sample(*args, rule=rule, backend=backend), expected)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, width", [(8, 2), (8, 33), (111, 5), (32000, 3), (151936, 2)])
@pytest.mark.parametrize("draft_vocab", ["same", "mapped", "padded"])
@pytest.mark.parametrize("rule", ["token", "recursive", "block"])
def test_same_bits_with_draft_logits(backend, dtype, vocab, width, draft_vocab, rule):
    if backend == "triton" and vocab > 1000 and (draft_vocab, rule) != ("mapped", "recursive"):
        pytest.skip("too long for the interpreter")
    if backend == "triton" and width > 9 and (draft_vocab, rule) != ("same", "recursive"):
        pytest.skip("too long for the interpreter")
    for seed in seeds_for(backend, dtype, vocab, width, 6 if vocab < 1000 else 1):
        g, logits, ids, parents, num_nodes = window_case(
            seed, dtype, vocab, width, chain=rule != "recursive"
        )
        near = logits.float().nan_to_num(0.0) + torch.randn(logits.shape, generator=g) * 0.5
        vocab_map = None
        if draft_vocab == "mapped":
            vocab_map = torch.randperm(vocab + 2, generator=g)[: vocab - 3] - 1
            near = near[..., vocab_map.clamp(0, vocab - 1)]
        if draft_vocab == "padded":
            near = torch.cat([near, torch.randn(3, width, 5, generator=g)], -1)
        draft = poison(near.to(DTYPES[seed % 3]), (num_nodes - 1).clamp(min=0))
        sampling = random_sampling(g, 3, vocab)
        if seed % 2:
            sampling = random_edits(g, sampling, vocab, width)
        results = [
            rejection_sample(
                logits, ids, parents, num_nodes, sampling, rule=rule, backend=b,
                draft_logits=draft, draft_vocab_map=vocab_map,
            )
            for b in ("reference", backend)
        ]  # fmt: skip
        assert_same(*results)


def test_reference_takes_injected_uniforms():
    logits = torch.zeros(1, 2, 4)
    tree = DraftTree.from_lists([[0, 2]], [[-1, 0]])
    params = settings_of(1)
    for u, accepted in ((0.24, 1), (0.25, 0), (0.9, 0)):
        result = reference.rejection_sample(
            logits, *tree[:3], params, None, None, "token",
            uniforms=lambda seed, position, stream, count, u=u: torch.full((1, count), u),
        )  # fmt: skip
        assert int(result.num_accepted) == accepted


class AcceptsOnEquality(reference.Chance):
    """The faulty test u q <= p."""

    def accepts(self, slot, draft, target):
        return super().accepts(slot, draft, target) or bool(draft == target)


def impossible_draft(rows=50):
    """Drafted tokens of probability 0 under the target, and 0 under the draft as well."""
    target = torch.zeros(rows, 2, 8)
    target[..., 3] = -math.inf
    draft = torch.zeros(rows, 2, 8)
    draft[..., 3] = -200.0
    ids = torch.tensor([[1, 3]]).expand(rows, -1)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows, -1)
    counts = torch.full((rows,), 2, dtype=torch.int32)
    return target, ids, parents, counts, settings_of(rows), draft


@pytest.mark.parametrize("backend", BACKENDS)
def test_probability_0_is_never_accepted(backend):
    *args, draft = impossible_draft(rows_for(backend, 50, 12))
    for options in ({"draft_logits": draft}, {}):
        result = rejection_sample(*args, rule="token", backend=backend, **options)
        assert not result.num_accepted.any()
        assert (result.output_token_ids[:, 0] != 3).all()
    result = rejection_sample(*args, rule="coupled", backend=backend)
    assert not result.num_accepted.any()


def test_negative_control_accepting_on_equality():
    *args, draft = impossible_draft()
    result = reference.rejection_sample(*args, draft, None, "token", chance=AcceptsOnEquality)
    assert (result.output_token_ids[:, 0] == 3).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "token", "block", "typical"])
def test_seed_alone_decides(backend, rule):
    """Batch order, padding slots, finished neighbours and threads change nothing."""
    vocab = rows_for(backend, 9000, 2500)
    g, logits, ids, parents, num_nodes = window_case(
        7, torch.float32, vocab, 6, batch=4, chain=rule == "block"
    )
    sampling = random_sampling(g, 4, vocab)
    expected = rejection_sample(
        logits, ids, parents, num_nodes, sampling, rule=rule, backend=backend
    )
    order = torch.tensor([2, 0, 3, 1])
    permuted = rejection_sample(
        logits[order], ids[order], parents[order], num_nodes[order],
        sampling.at(order), rule=rule, backend=backend,
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
    rows = rows_for(backend, 80, 9)
    target = torch.randn(rows, 2, 8, generator=torch.Generator().manual_seed(1))
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows, -1)
    counts = torch.full((rows,), 2, dtype=torch.int32)
    for drafted, accepted in ((3, 1), (-1, 0), (8, 0), (2**40, 0)):
        ids = torch.tensor([[0, drafted]]).expand(rows, -1)
        result = rejection_sample(
            target, ids, parents, counts, settings_of(rows), draft_logits=target, rule="token",
            backend=backend,
        )  # fmt: skip
        assert (result.num_accepted == accepted).all()
        assert (result.output_token_ids[:, 0] < 8).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["coupled", "recursive", "block", "typical"])
@pytest.mark.parametrize("drafted", [False, True])
def test_temperature_0_equals_verify_greedy(backend, rule, drafted):
    g, logits, ids, parents, num_nodes = window_case(
        3, torch.bfloat16, 111, 9, chain=rule == "block"
    )
    sampling = settings_of(3, temperature=0.0, top_k=3)
    draft = torch.randn(logits.shape, generator=g) if drafted else None
    args = (logits, ids, parents, num_nodes)
    result = rejection_sample(*args, sampling, draft_logits=draft, rule=rule, backend=backend)
    assert_same(result, verify_greedy(*args, backend=backend))


special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 3e38, -3e38])
number = st.floats(-8, 8, width=32)


@pytest.mark.parametrize("backend", NATIVE)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(number, special), min_size=1, max_size=20),
    st.lists(st.one_of(number, number, special), min_size=1, max_size=20),
    st.integers(0, 10**6),
)
def test_fuzz_against_reference(backend, values, draft_values, seed):
    g = torch.Generator().manual_seed(seed)
    vocab = len(values)
    for chain in (False, True):
        width = rows_for(backend, 4, 2)
        ids, parents, num_nodes = random_window(g, 3, width, vocab, chain)
        rows = torch.tensor(values)[torch.randperm(vocab, generator=g)]
        target = rows.expand(3, width, -1)
        draft = torch.tensor(draft_values).expand(3, width, -1) if chain else None
        sampling = random_sampling(g, 3, vocab)
        for rule in ("token",) if chain else ("coupled", "token"):
            expected, other = [
                rejection_sample(
                    target, ids, parents, num_nodes, sampling, draft_logits=draft, rule=rule,
                    backend=b,
                )
                for b in ("reference", backend)
            ]  # fmt: skip
            emitted = expected.output_token_ids >= 0
            assert torch.equal(emitted.any(-1), num_nodes > 0)
            assert (expected.output_token_ids < vocab).all()
            assert_same(other, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_for_chains_refuse_trees(backend):
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    args = (logits, ids, parents, torch.full((2,), 3, dtype=torch.int32), settings_of(2))
    for rule in ("token", "block"):
        with pytest.raises(ValueError, match=r"expected chains.*'recursive' is the one for trees"):
            rejection_sample(*args, draft_logits=logits, rule=rule, backend=backend)


def test_errors_name_the_argument():
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    parents = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    args = (logits, ids, parents, torch.full((2,), 3, dtype=torch.int32), settings_of(2))
    with pytest.raises(ValueError, match=r"rule as one of auto, coupled, token, .*, got 'x'"):
        rejection_sample(*args, rule="x")
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
        op, (logits, ids, parents, num_nodes, *sampling, draft, None, "token", 0.09, 0.3)
    )
    args = (logits, ids, parents, num_nodes, sampling)
    compiled = torch.compile(rejection_sample, fullgraph=True)
    assert_same(
        compiled(*args, draft_logits=draft, rule="token"),
        rejection_sample(*args, draft_logits=draft, rule="token"),
    )
