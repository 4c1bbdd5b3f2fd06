import pytest
import torch
from helpers import backends
from torch.testing import assert_close

from specdec_kernels.ops.linear_small_m import linear_small_m

BACKENDS = backends("linear_small_m")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 7, 16, 33, 64, 65, 130]
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the compiled module")


def case(rows, columns, depth, dtype, bias=True, seed=0):
    """Strided x and weight, NaN in the gaps between their rows."""
    g = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.full((size, depth + 3), float("nan"), dtype=dtype)[:, :depth]
        for size in (rows, columns)
    )
    x.copy_(torch.randn(rows, depth, generator=g))
    weight.copy_(torch.randn(columns, depth, generator=g))
    return x, weight, torch.randn(columns, generator=g).to(dtype) if bias else None


def check_against_double(y, x, weight, bias):
    """The two-error rule: at most twice the error of PyTorch in the same dtype.

    PyTorch gets dense copies: its bf16 product on AMX multiplies what lies between rows by zero.
    """
    wide = None if bias is None else bias.double()
    exact = torch.nn.functional.linear(x.double(), weight.double(), wide)
    rival = torch.nn.functional.linear(x.contiguous(), weight.contiguous(), bias)
    scale = exact.abs().max().item() + 1
    floor = 1e-6 if x.dtype == torch.float32 else 1e-5
    error, rival_error = ((t.double() - exact).abs().max().item() for t in (y, rival))
    assert y.dtype == x.dtype and y.is_contiguous()
    assert error <= 2 * rival_error + floor * scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 5, 63, 64, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_double(backend, dtype, depth):
    for columns in (1, 7, 16, 111):
        for rows in ROWS:
            x, weight, bias = case(rows, columns, depth, dtype, bias=rows % 2 == 1)
            y = linear_small_m(x, weight, bias, backend=backend)
            check_against_double(y, x, weight, bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_deep_rows_are_split_and_joined(backend, dtype):
    for rows in (1, 5, 12):
        x, weight, bias = case(rows, 26, 6000, dtype)
        y = linear_small_m(x, weight, bias, backend=backend)
        check_against_double(y, x, weight, bias)


def assert_rows_stand_alone(x, weight, bias, counts):
    """The last rows alone give the bits that they have among all."""
    whole = linear_small_m(x, weight, bias, backend="cpu")
    for rows in counts:
        part = linear_small_m(x[len(x) - rows :], weight, bias, backend="cpu")
        assert torch.equal(part, whole[len(x) - rows :]), rows


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, depth", [(1, 5), (26, 6000), (111, 576), (200, 1537)])
def test_a_row_does_not_depend_on_the_others(dtype, columns, depth):
    x, weight, bias = case(130, columns, depth, dtype)
    assert_rows_stand_alone(x, weight, bias, [*range(1, 18), 33, 64, 65, 129])


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns, depth", [(576, 576), (45, 896), (896, 61), (39, 1536), (1536, 33), (8, 1), (3, 577)]
)
def test_every_number_of_rows_up_to_64(dtype, columns, depth):
    x, weight, bias = case(64, columns, depth, dtype)
    assert_rows_stand_alone(x, weight, bias, range(1, 64))


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns, depth", [(30, 4096), (4096, 40), (18, 49152), (49152, 8), (896, 896), (1536, 576)]
)
def test_large_layers_by_rows(dtype, columns, depth):
    x, weight, bias = case(64, columns, depth, dtype)
    assert_rows_stand_alone(x, weight, bias, (1, 2, 5, 6, 7, 9, 10, 16, 17, 31, 32, 48, 63))


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    threads = torch.get_num_threads()
    try:
        for rows, columns in ((1, 111), (9, 576), (70, 37)):
            x, weight, bias = case(rows, columns, 576, dtype)
            results = []
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                results.append(linear_small_m(x, weight, bias, backend="cpu"))
            assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_and_odd_shapes(backend):
    x, weight, bias = case(3, 5, 0, torch.float32)
    assert torch.equal(linear_small_m(x, weight, bias, backend=backend), bias.expand(3, 5))
    assert linear_small_m(x[:0], weight, bias, backend=backend).shape == (0, 5)
    assert linear_small_m(x, weight[:0], None, backend=backend).shape == (3, 0)
    x, weight, bias = case(4, 6, 8, torch.float32)
    expected = linear_small_m(x, weight, bias, backend=backend)
    columns_first = weight.T.contiguous().T, bias.repeat_interleave(2)[::2]
    assert_close(linear_small_m(x, *columns_first, backend=backend), expected)
    same = linear_small_m(x[:1].expand(4, 8), weight, bias, backend=backend)
    assert_close(same, expected[:1].expand(4, 6))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_row(backend, dtype):
    x, weight, bias = case(6, 9, 70, dtype)
    clean = linear_small_m(x, weight, bias, backend=backend)
    x[2, 66], x[4, 3] = float("nan"), float("inf")
    y = linear_small_m(x, weight, bias, backend=backend)
    assert y[2].isnan().all() and y[4].isinf().all()
    assert_close(y[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_rows(dtype):
    x, weight, bias = case(24, 5, 40, dtype)
    expected = linear_small_m(x, weight, bias)
    for shape in ((24,), (2, 12), (1, 24), (2, 3, 4), (1, 4, 1, 6), (24, 1, 1)):
        y = linear_small_m(x.view(*shape, 40), weight, bias)
        assert y.shape == (*shape, 5)
        assert torch.equal(y.view(24, 5), expected)
    assert torch.equal(linear_small_m(x[3], weight, bias), expected[3])
    strided = x.view(2, 12, 40)[:, 1:5]
    y = linear_small_m(strided, weight, bias)
    assert torch.equal(y, expected.view(2, 12, 5)[:, 1:5])
    y = linear_small_m(x.view(2, 12, 40).transpose(0, 1), weight, bias)
    assert torch.equal(y, expected.view(2, 12, 5).transpose(0, 1))
    assert linear_small_m(x.view(2, 12, 40)[:, :0], weight, bias).shape == (2, 0, 5)


def test_errors_name_the_argument():
    x, weight, bias = case(2, 3, 4, torch.float32)
    with pytest.raises(ValueError, match=r"linear_small_m: expected x \[K\].*got \[\]"):
        linear_small_m(x[0, 0], weight)
    with pytest.raises(ValueError, match=r"linear_small_m: expected weight \[N, K\] with.*'K': 4"):
        linear_small_m(x, weight[:, :3])
    with pytest.raises(TypeError, match="expected weight as float32, got bfloat16"):
        linear_small_m(x, weight.bfloat16())
    with pytest.raises(TypeError, match="expected x as float32 or bfloat16 or float16, got int64"):
        linear_small_m(x.long(), weight)
    with pytest.raises(ValueError, match=r"expected bias \[N\].*got \[2\]"):
        linear_small_m(x, weight, bias[:2])
    with pytest.raises(TypeError, match="expected weight as a tensor"):
        linear_small_m(x, None)
    with pytest.raises(RuntimeError, match=r"linear_small_m: .*requires grad"):
        linear_small_m(x, torch.nn.Parameter(weight))
    with torch.no_grad():
        assert linear_small_m(x, torch.nn.Parameter(weight)).shape == (2, 3)


def test_opcheck_and_compile():
    x, weight, bias = case(3, 20, 40, torch.bfloat16)
    op = torch.ops.specdec_kernels.linear_small_m.default
    torch.library.opcheck(op, (x, weight, bias))
    torch.library.opcheck(op, (x, weight, None))
    compiled = torch.compile(linear_small_m, fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), linear_small_m(x, weight, bias))
    assert torch.equal(compiled(x, weight), linear_small_m(x, weight))
