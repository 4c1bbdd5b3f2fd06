import math

import pytest
import torch
from helpers import backends
from hypothesis import example, given
from hypothesis import strategies as st
from sampling_cases import rows_for, too_long

from specdec_kernels.ops.topk_logprobs import reference, topk_logprobs

BACKENDS = backends("topk_logprobs")

NATIVE = [b for b in BACKENDS if b != "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def awkward_logits(vocab, dtype):
    """Rows of several scales, many ties, ascending and descending, with -infinity and NaN."""
    g = torch.Generator().manual_seed(vocab)
    rows = torch.randn(9, vocab, generator=g) * torch.tensor([[0.01], [1], [5]]).repeat(3, 1)
    rows[2] = rows[2].sort().values
    rows[3] = rows[3].sort(descending=True).values
    rows[4] = (rows[4] * 2).round()
    rows[5] += 1000
    rows[6][torch.rand(vocab, generator=g) < 0.5] = -math.inf
    rows[7][torch.rand(vocab, generator=g) < 0.1] = math.nan
    rows[8] = 0.5
    return rows.to(dtype)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 111, 255, 257, 4099, 32000, 50257, 151936])
def test_same_bits_as_reference(backend, dtype, vocab):
    if too_long(backend, vocab, dtype):
        pytest.skip("tested in another dtype")
    logits, wanted = awkward_logits(vocab, dtype), (1, 2, 10, 64, 200)
    if backend == "triton":
        logits, wanted = (logits[4:7], (10,)) if vocab > 20000 else (logits, (1, 33))
    longest = topk_logprobs(logits, 200, backend="reference")
    for k in wanted:
        expected = longest[0][:, :k], longest[1][:, :k], longest[2]
        assert_equal(topk_logprobs(logits, k, backend=backend), expected)


def slow_topk(row, k):
    """One row by sorting pairs, in float64."""
    values = [-math.inf if math.isnan(x) else x for x in row.double().tolist()]
    largest = max(values)
    if largest == math.inf:
        values = [0.0 if x == math.inf else -math.inf for x in values]
    base = largest if math.isfinite(largest) else 0.0
    total = math.fsum(math.exp(x - base) for x in values)
    best = sorted((-x, i) for i, x in enumerate(values) if x > -math.inf)[:k]
    ids = [i for _, i in best] + [-1] * (k - len(best))
    logprobs = [-x - base - math.log(total) for x, _ in best] + [-math.inf] * (k - len(best))
    return logprobs, ids, largest + math.log(total) if total else -math.inf


special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1e4, -1e4, 1e-45])
number = st.floats(-20, 20, width=32)


@pytest.mark.parametrize("backend", BACKENDS)
@example([0.0, 1.0, 1e-45], torch.float32, 2)
@given(
    st.lists(st.one_of(special, number, number), min_size=1, max_size=50),
    st.sampled_from(DTYPES),
    st.integers(1, 60),
)
def test_fuzz_against_sorted_pairs(backend, values, dtype, k):
    logits = torch.tensor([values]).to(dtype)
    logprobs, ids, lse = slow_topk(logits[0], k)
    got = topk_logprobs(logits, k, backend=backend)
    assert got[1][0].tolist() == ids
    assert got[0][0].tolist() == pytest.approx(logprobs, rel=1e-6, abs=1e-6)
    assert got[2].tolist() == pytest.approx([lse], rel=1e-6, abs=1e-6)
    assert_equal(got, topk_logprobs(logits, k, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [111, 50257])
def test_two_error_rule(backend, vocab):
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=g) * 4 + torch.tensor([0.0, 3000.0]).repeat(4)[:, None]
    exact = torch.log_softmax(logits.double(), -1)
    ulp = torch.finfo(torch.float32).eps
    logprobs, ids, lse = topk_logprobs(logits, 50, backend=backend)
    error = (logprobs - exact.gather(1, ids)).abs().max()
    theirs = (torch.log_softmax(logits, -1).gather(1, ids) - exact.gather(1, ids)).abs().max()
    assert error <= max(2 * theirs, 8 * ulp)
    exact = logits.double().logsumexp(-1)
    theirs = (logits.logsumexp(-1) - exact).abs()
    assert ((lse - exact).abs() <= torch.maximum(2 * theirs, exact.abs() * ulp)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_smallest_masses_count(backend):
    """Down to half of the last bit, exp(-28.42), of which 151935 are one unit of fp32 beside 1."""
    logits = torch.tensor([-26.5, -27.5, -28.4, -28.5, -29.5])[:, None].repeat(1, 151936)
    logits[:, 77777] = 0.0
    got = topk_logprobs(logits, 2, backend=backend)
    assert (got[2] > 0).tolist() == [True, True, True, False, False]
    assert_equal(got, topk_logprobs(logits, 2, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_edges(backend):
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [nan, -inf, nan, -inf],
            [nan, 2.0, -inf, 2.0],
            [inf, 5.0, nan, inf],
            [-3e38, 3e38, -inf, 3e38],
            [0.0, -0.0, 0.0, -0.0],
        ]
    )
    logprobs, ids, lse = topk_logprobs(logits, 6, backend=backend)
    assert ids.tolist() == [
        [-1, -1, -1, -1, -1, -1],
        [1, 3, -1, -1, -1, -1],
        [0, 3, -1, -1, -1, -1],
        [1, 3, -1, -1, -1, -1],
        [0, 1, 2, 3, -1, -1],
    ]
    assert torch.equal(logprobs == -inf, ids == -1)
    listed = torch.tensor([0.5] * 6 + [0.25] * 4).log()
    torch.testing.assert_close(logprobs[ids >= 0], listed)
    expected = torch.tensor([-inf, 2 + math.log(2), inf, 3e38, math.log(4)])
    torch.testing.assert_close(lse, expected)
    for seed in (0, 1):  # ties at the last place
        g = torch.Generator().manual_seed(seed)
        row = torch.randint(0, 3, (1, 1000), generator=g).float()
        expected_ids = (row == 2).nonzero()[:7, 1]
        assert torch.equal(topk_logprobs(row, 7, backend=backend)[1][0], expected_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_layout_and_threads_change_nothing(backend):
    vocab = rows_for(backend, 40001, 5001)
    logits = awkward_logits(vocab, torch.float32)
    expected = topk_logprobs(logits, 12, backend=backend)
    strided = torch.full((9, vocab + 9), math.nan)
    strided[:, :vocab] = logits
    strided[:, vocab:] = math.inf
    assert_equal(topk_logprobs(strided[:, :vocab], 12, backend=backend), expected)
    assert_equal(topk_logprobs(logits.t().contiguous().t(), 12, backend=backend), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 16):
            torch.set_num_threads(count)
            assert_equal(topk_logprobs(logits, 12, backend=backend), expected)
            alone = topk_logprobs(logits[4:5], 12, backend=backend)
            assert_equal(alone, [x[4:5] for x in expected])
    finally:
        torch.set_num_threads(threads)


def test_reference_in_float64():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logprobs, ids, lse = reference.topk_logprobs(logits, 20)
    expected = torch.log_softmax(logits, -1).topk(20)
    torch.testing.assert_close(logprobs, expected.values, rtol=1e-14, atol=1e-14)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    logprobs, ids, lse = topk_logprobs(torch.zeros(0, 5), 3, backend=backend)
    assert (logprobs.shape, ids.shape, lse.shape) == ((0, 3), (0, 3), (0,))


def test_errors_name_the_argument():
    logits = torch.zeros(2, 5)
    with pytest.raises(TypeError, match=r"topk_logprobs: expected logits as float32.*got int64"):
        topk_logprobs(logits.long(), 1)
    with pytest.raises(ValueError, match=r"expected logits \[N, V\] .*got \[5\]"):
        topk_logprobs(logits[0], 1)
    with pytest.raises(ValueError, match="expected k of at least 1, got 0"):
        topk_logprobs(logits, 0)
    with pytest.raises(ValueError, match="at least one token"):
        topk_logprobs(logits[:, :0], 1)
    with pytest.raises(RuntimeError, match="without gradients"):
        topk_logprobs(logits.requires_grad_(), 1)


def test_opcheck_and_compile():
    logits = torch.randn(4, 111, generator=torch.Generator().manual_seed(0))
    torch.library.opcheck(torch.ops.specdec_kernels.topk_logprobs.default, (logits, 5))
    compiled = torch.compile(topk_logprobs, fullgraph=True)(logits, 5)
    assert_equal(compiled, topk_logprobs(logits, 5))
