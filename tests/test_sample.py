import math

import pytest
import torch
import transformers
from helpers import backends
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    FALSE_ALARM,
    chi_square_pvalue,
    is_slow,
    random_sampling,
    rows_for,
    too_long,
)

from specdec_kernels.ops import _random
from specdec_kernels.ops.sample import reference, sample
from specdec_kernels.tree import SamplingParams

BACKENDS = backends("sample")

NATIVE = [b for b in BACKENDS if b != "reference"]
# Statistics take too many rows for an interpreter: its tokens are held to those of the reference.
STATISTICAL = [b for b in BACKENDS if not is_slow(b)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 8, 31, 111, 1000, 32000, 50257, 151936])
def test_same_bits_as_reference(backend, dtype, vocab):
    if too_long(backend, vocab, dtype):
        pytest.skip("tested in another dtype")
    g = torch.Generator().manual_seed(vocab)
    rows = rows_for(backend, 60, 12) if vocab <= 1000 else rows_for(backend, 4, 2)
    scale = torch.tensor([0.01, 1.0, 4.0])[torch.randint(0, 3, (rows, 1), generator=g)]
    logits = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
    logits[::3] = logits[::3].masked_fill(
        torch.rand(rows, vocab, generator=g)[::3] < 0.4, -math.inf
    )
    sampling = random_sampling(g, rows, vocab)
    for stream in ("bonus", "draft"):
        expected = sample(logits, sampling, stream=stream, backend="reference")
        assert torch.equal(sample(logits, sampling, stream=stream, backend=backend), expected)


SHAPES = [
    "decay", "slow decay", "two plateaus", "few finite", "one place", "wide", "hidden from a sample"
]  # fmt: skip


def shaped(name, vocab, g):
    """Rows whose nucleus is narrow, wide, a tie, lies in one place, or where no sample sees it."""
    noise = torch.rand(vocab, generator=g) * 1e-3
    if name == "decay":
        return noise - torch.randperm(vocab, generator=g) / 40
    if name == "slow decay":
        return noise - torch.randperm(vocab, generator=g) / 4000
    if name == "two plateaus":
        row = torch.full((vocab,), -9.0)
        row[torch.randperm(vocab, generator=g)[:60]] = 3.0
        return row
    if name == "few finite":
        row = torch.full((vocab,), -math.inf)
        row[torch.randperm(vocab, generator=g)[:7]] = noise[:7]
        return row
    if name == "wide":
        return torch.randn(vocab, generator=g) * 2
    if name == "hidden from a sample":  # every 16th stride, of any instruction set, looks different
        at = torch.arange(vocab)
        sampled = (at % 4096 < 256) | (at % 2048 < 128) | (at % 1024 < 64)
        return torch.where(sampled, noise - 5.0, torch.rand(vocab, generator=g) * -9.0)
    row = noise - 30.0
    row[vocab // 2 : vocab // 2 + 90] = noise[:90] * 1e3
    return row


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("vocab", [5000, 50257])
@pytest.mark.parametrize("name", SHAPES)
def test_same_bits_however_the_nucleus_lies(backend, vocab, name):
    if backend == "triton" and vocab > 20000:
        pytest.skip("too long for the interpreter")
    g = torch.Generator().manual_seed(vocab)
    filters = [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 50, 90, 400)
        for top_p in (1.0, 0.999, 0.9, 0.2, 0.0)
        for min_p in (0.0, 0.05)
    ]
    filters = filters[:: rows_for(backend, 1, 7)]
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*filters, strict=True))
    sampling = SamplingParams.make(len(filters), seed=range(len(filters)), position=3)
    sampling = sampling._replace(top_k=top_k.int(), top_p=top_p, min_p=min_p)
    logits = shaped(name, vocab, g).expand(len(filters), -1)
    for temperature in (0.7, 3.0):
        sampling = sampling._replace(temperature=torch.full((len(filters),), temperature))
        expected = sample(logits, sampling, backend="reference")
        assert torch.equal(sample(logits, sampling, backend=backend), expected)


@pytest.mark.parametrize("backend", STATISTICAL)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_distribution(backend, temperature):
    """60,000 draws against softmax; a wrong temperature must fail the same test."""
    rows, vocab = 60000, 16
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2
    sampling = SamplingParams.make(rows, temperature=temperature, seed=range(rows), position=3)
    tokens = sample(logits.expand(rows, -1), sampling, backend=backend)
    counts = torch.bincount(tokens, minlength=vocab)
    exact = torch.softmax(logits.double() / temperature, -1)
    assert chi_square_pvalue(counts, exact) > FALSE_ALARM
    wrong = torch.softmax(logits.double() / (temperature * 1.1), -1)
    assert chi_square_pvalue(counts, wrong) < FALSE_ALARM


@pytest.mark.parametrize("backend", STATISTICAL)
def test_joint_over_positions(backend):
    """Neighbouring positions and the two streams are independent."""
    rows, vocab = 40000, 6
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    exact = torch.softmax(logits.double(), -1)
    first = SamplingParams.make(rows, seed=range(rows), position=10)
    second = first._replace(position=first.position + 1)
    a = sample(logits[:1].expand(rows, -1), first, backend=backend)
    joint = (exact[0][:, None] * exact[1]).flatten()
    for other in (
        sample(logits[1:].expand(rows, -1), second, backend=backend),
        sample(logits[1:].expand(rows, -1), first, stream="draft", backend=backend),
    ):
        counts = torch.bincount(a * vocab + other, minlength=vocab * vocab)
        assert chi_square_pvalue(counts, joint) > FALSE_ALARM
    shared = sample(logits[1:].expand(rows, -1), first, backend=backend)
    counts = torch.bincount(a * vocab + shared, minlength=vocab * vocab)
    assert chi_square_pvalue(counts, joint) < FALSE_ALARM


@pytest.mark.parametrize("vocab", [5, 111, 50257])
def test_kept_set_is_that_of_transformers(vocab):
    """On logits without ties; the masses that top_p compares are ours, so p is kept off edges."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(1, vocab, generator=g) * 3
    for top_k, top_p, min_p in [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (vocab, 1.0, 0.0),
        (vocab + 1, 1.0, 0.0),
        (4, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.05),
        (3, 0.6, 0.1),
        (40, 0.95, 0.001),
    ]:
        expected = logits
        if top_k:
            expected = transformers.TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = transformers.TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = transformers.MinPLogitsWarper(min_p)(None, expected)
        params = SamplingParams.make(1, top_k=top_k, top_p=top_p, min_p=min_p)
        rows = reference.prepare(logits, *params[:4])
        assert torch.equal(rows.kept, expected.isfinite()), (top_k, top_p, min_p)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_at_a_threshold_are_kept(backend):
    rows = rows_for(backend, 4000, 12)
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0, -0.0]]).expand(rows, -1)
    for filters, kept in [
        ({"top_k": 2}, {0, 2, 3, 4}),
        ({"top_p": 0.5}, {0, 2, 3, 4}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": math.exp(-1.0) * 0.999}, {0, 2, 3, 4}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5, 6}),
    ]:
        sampling = SamplingParams.make(rows, seed=range(rows), temperature=1.0, **filters)
        drawn = sample(logits, sampling, backend=backend)
        if backend in STATISTICAL:
            assert set(drawn.tolist()) == kept, filters
        assert torch.equal(drawn, sample(logits, sampling, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperature_0_is_greedy(backend):
    rows = rows_for(backend, 50, 9)
    logits = torch.randn(rows, 111, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = logits.float().argmax(-1)
    for filters in ({}, {"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9}):
        sampling = SamplingParams.make(rows, temperature=0.0, **filters)
        assert torch.equal(sample(logits, sampling, backend=backend), expected)
    for filters in ({"temperature": 1e-4, "top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        sampling = SamplingParams.make(rows, **filters)
        drawn = sample(logits, sampling, backend=backend)
        assert torch.equal(logits.gather(1, drawn[:, None]), logits.amax(-1, keepdim=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_seed_alone_decides(backend):
    """Batch order, neighbours, memory layout and thread count change nothing."""
    g = torch.Generator().manual_seed(3)
    vocab = rows_for(backend, 20000, 4100)
    logits = torch.randn(6, vocab, generator=g)
    sampling = random_sampling(g, 6, vocab)
    expected = sample(logits, sampling, backend=backend)
    order = torch.randperm(6, generator=g)
    permuted = sampling.at(order)
    assert torch.equal(sample(logits[order], permuted, backend=backend), expected[order])
    for i in range(6):
        alone = sampling.at(slice(i, i + 1))
        assert torch.equal(sample(logits[i : i + 1], alone, backend=backend), expected[i : i + 1])
    strided = torch.full((6, vocab + 7), math.nan)
    strided[:, :vocab] = logits
    assert torch.equal(sample(strided[:, :vocab], sampling, backend=backend), expected)
    assert torch.equal(sample(logits.t().contiguous().t(), sampling, backend=backend), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 16):
            torch.set_num_threads(count)
            assert torch.equal(sample(logits, sampling, backend=backend), expected)
            first = sampling.at(slice(1))
            assert torch.equal(sample(logits[:1], first, backend=backend), expected[:1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_and_nan(backend):
    rows = rows_for(backend, 3000, 40)
    sampling = SamplingParams.make(rows, seed=range(rows), top_p=0.9)
    logits = torch.zeros(rows, 12)
    logits[:, 3], logits[:, 8] = math.inf, math.inf
    drawn = sample(logits, sampling, backend=backend)
    counts = torch.bincount(drawn, minlength=12)
    assert chi_square_pvalue(counts, torch.eye(12)[[3, 8]].mean(0)) > FALSE_ALARM
    assert torch.equal(drawn, sample(logits, sampling, backend="reference"))
    logits[:, 5] = math.nan
    logits[:, 6] = 1.0
    assert (sample(logits, sampling, backend=backend) == 6).all()
    for value in (-math.inf, math.nan):
        logits.fill_(value)
        assert (sample(logits, sampling, backend=backend) == 0).all()


special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 3e38, -3e38, 1e-45])
number = st.floats(-20, 20, width=32)


@pytest.mark.parametrize("backend", NATIVE)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(special, number), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
    st.integers(0, 10**6),
)
def test_fuzz_against_reference(backend, values, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    rows = rows_for(backend, 8, 2)
    logits = torch.tensor([values] * rows).to(dtype)
    sampling = random_sampling(g, rows, len(values))
    expected = sample(logits, sampling, backend="reference")
    assert ((expected >= 0) & (expected < len(values))).all()
    assert torch.equal(sample(logits, sampling, backend=backend), expected)


def test_reference_in_float64():
    """Given fp64 the reference computes in fp64, with the same noise."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(4))
    sampling = SamplingParams.make(200, seed=range(200), top_p=0.9, temperature=0.8)
    double = reference.sample(logits.double(), sampling, _random.BONUS)
    assert torch.equal(double, reference.sample(logits, sampling, _random.BONUS))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend):
    assert sample(torch.zeros(0, 5), SamplingParams.make(0), backend=backend).shape == (0,)


def test_errors_name_the_argument():
    logits, sampling = torch.zeros(2, 5), SamplingParams.make(2)
    with pytest.raises(TypeError, match=r"sample: expected logits as float32.*got int64"):
        sample(logits.long(), sampling)
    with pytest.raises(ValueError, match=r"expected sampling.top_k \[N\] with .*got \[3\]"):
        sample(logits, sampling._replace(top_k=torch.zeros(3, dtype=torch.int32)))
    with pytest.raises(TypeError, match=r"expected sampling.seed as int64, got int32"):
        sample(logits, sampling._replace(seed=sampling.seed.int()))
    with pytest.raises(ValueError, match="expected stream as one of bonus, draft, got 'x'"):
        sample(logits, sampling, stream="x")
    with pytest.raises(ValueError, match="at least one token"):
        sample(logits[:, :0], sampling)


def test_opcheck_and_compile():
    logits = torch.randn(4, 111, generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams.make(4, seed=range(4), top_p=0.9)
    op = torch.ops.specdec_kernels.sample.default
    torch.library.opcheck(op, (logits, *sampling, _random.BONUS))
    compiled = torch.compile(sample, fullgraph=True)(logits, sampling)
    assert torch.equal(compiled, sample(logits, sampling))
