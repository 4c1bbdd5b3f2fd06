import pytest
import torch
from helpers import backends

from specdec_kernels.ops.rms_norm import reference, rms_norm

BACKENDS = backends("rms_norm")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def case(shape, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(*shape, generator=g)).to(dtype)
    return x, (1 + torch.randn(shape[-1], generator=g)).to(dtype)


def exact(x, weight, eps=EPS):
    """In double, rounded where the op rounds."""
    wide = x.double()
    scaled = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return weight.double() * scaled.to(x.dtype).double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [1, 3, 16, 63, 64, 576, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_double(backend, dtype, dim):
    """Within one step of the dtype for the product and three for the quotient."""
    for scale in (1e-3, 1.0, 100.0):
        x, weight = case((7, dim), dtype, scale=scale)
        y = rms_norm(x, weight, eps=EPS, backend=backend)
        assert y.dtype == dtype and y.shape == x.shape
        expected = exact(x, weight)
        step = torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).tiny
        assert ((y.double() - expected).abs() <= 4 * step).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_stand_alone(dtype):
    x, weight = case((200, 577), dtype)
    whole = rms_norm(x, weight, eps=EPS)
    for begin, end in ((0, 1), (5, 8), (150, 200)):
        assert torch.equal(rms_norm(x[begin:end], weight, eps=EPS), whole[begin:end])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(rms_norm(x, weight, eps=EPS), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    x, weight = case((4, 6, 40), torch.bfloat16)
    expected = rms_norm(x, weight, eps=EPS, backend=backend)
    spread = torch.full((4, 6, 50), float("nan"), dtype=x.dtype)
    spread[..., 5:45] = x
    for same in (spread[..., 5:45], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(rms_norm(same, weight, eps=EPS, backend=backend), expected)
    columns = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rms_norm(columns, weight, eps=EPS, backend=backend), expected)
    every_other = weight.repeat_interleave(2)[::2]
    assert torch.equal(rms_norm(x, every_other, eps=EPS, backend=backend), expected)
    assert torch.equal(rms_norm(x[1, 2], weight, eps=EPS, backend=backend), expected[1, 2])
    assert rms_norm(x[:, :0], weight, eps=EPS, backend=backend).shape == (4, 0, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_infinity_and_zero_stay_in_their_row(backend):
    x, weight = case((4, 64), torch.float32)
    expected = rms_norm(x, weight, eps=EPS, backend=backend)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0.0
    y = rms_norm(x, weight, eps=EPS, backend=backend)
    assert y[0].isnan().all()
    assert y[1, 5].isnan() and (y[1, :5] == 0).all()
    assert (y[2] == 0).all()
    assert torch.equal(y[3], expected[3])


def test_errors_name_the_argument():
    x, weight = case((2, 3, 8), torch.float32)
    with pytest.raises(ValueError, match=r"rms_norm: expected weight \[D\].*got \[7\]"):
        rms_norm(x, weight[:7], eps=EPS)
    with pytest.raises(TypeError, match="expected weight as float32, got bfloat16"):
        rms_norm(x, weight.bfloat16(), eps=EPS)
    with pytest.raises(TypeError, match="expected x as float32 or bfloat16 or float16, got int64"):
        rms_norm(x.long(), weight, eps=EPS)
    with pytest.raises(TypeError, match="expected x as a tensor"):
        rms_norm([1.0], weight, eps=EPS)
    with pytest.raises(RuntimeError, match="requires grad"):
        rms_norm(x, torch.nn.Parameter(weight), eps=EPS)


def test_opcheck_and_compile():
    x, weight = case((2, 3, 8), torch.float32)
    torch.library.opcheck(torch.ops.specdec_kernels.rms_norm.default, (x, weight, EPS))
    compiled = torch.compile(lambda *a: rms_norm(*a, eps=EPS) * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), rms_norm(x, weight, eps=EPS) * 2)


def test_reference_is_what_models_do():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in DTYPES:
        x, weight = case((5, 96), dtype)
        module = LlamaRMSNorm(96, eps=1e-6).to(dtype)
        module.weight.data = weight
        with torch.no_grad():
            assert torch.equal(module(x), reference.rms_norm(x, weight, 1e-6))
