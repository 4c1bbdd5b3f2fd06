"""RMS norms of verify forwards: which run through the kernel, and what it changes."""

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

from specdec_kernels import native
from specdec_kernels.hf import layers
from specdec_kernels.hf.norm import norm_forwards

pytestmark = pytest.mark.skipif(native.cpu is None, reason="needs the compiled kernels")


@pytest.fixture
def calls(monkeypatch):
    """Shapes of what the kernel was given."""
    seen = []
    quickest = layers.quickest

    def counting(op):
        run = quickest(op)
        if op is not layers.rms_norm:
            return run
        return lambda *args: (seen.append(args[0].shape), run(*args))[1]

    monkeypatch.setattr(layers, "quickest", counting)
    return seen


def norms(model):
    return [m for m in model.modules() if "RMSNorm" in type(m).__name__]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_common_norm_is_taken(name, dtype):
    model = fresh(name).to(dtype)
    assert [m for m, _ in norm_forwards(model)] == norms(model) != []


def test_norms_that_compute_something_else_are_left_alone():
    assert norms(fresh("gemma3_text")) and norm_forwards(fresh("gemma3_text")) == []
    model = fresh("llama")
    odd, hooked, wide, *others = norms(model)
    odd.forward = lambda x: 2 * x
    hooked.register_forward_hook(lambda module, args, out: 2 * out)  # it runs around any forward
    wide.weight = torch.nn.Parameter(wide.weight.double())
    assert [m for m, _ in norm_forwards(model)] == [hooked, *others]


def test_they_run_in_verify_forwards_alone(calls):
    model = fresh("llama")
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)
    with accelerated(model, num_speculative_tokens=4) as metrics:
        assert new_tokens(model, inputs) == expected
    assert len(calls) == metrics.num_steps * len(norms(model))
    assert not any("forward" in vars(module) for module in model.modules())
    calls.clear()
    with accelerated(model, num_speculative_tokens=4, linear="off"):
        assert new_tokens(model, inputs) == expected
    assert calls == []


def test_an_input_of_another_dtype_gets_the_norms_own_forward(calls):
    model = fresh("llama").bfloat16()
    norm, x = norms(model)[0], torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = norm(x)
        with layers.LayerFlip(model).verify(rows=3):
            assert torch.equal(norm(x), expected)
            assert calls == []
            norm(x.bfloat16())
    assert calls == [(1, 3, 32)]
