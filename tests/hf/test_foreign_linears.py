"""E03: linear layers that are not plain ones keep their own forward; the text stays the same."""

import warnings

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, use_as_kernel
from torch import nn
from torch.nn import functional
from transformers import StoppingCriteria

from specdec_kernels import native
from specdec_kernels.hf import linear

pytestmark = pytest.mark.skipif(native.cpu is None, reason="needs the compiled kernels")


class Int8Linear(nn.Linear):
    """Weights in 8 bits with a scale per output, as weight-only quantisation keeps them."""

    def __init__(self, old):
        super().__init__(old.in_features, old.out_features, bias=False)
        self.scale = old.weight.detach().abs().amax(1, keepdim=True) / 127
        self.packed = (old.weight.detach() / self.scale).round().to(torch.int8)
        self.weight.data.fill_(float("nan"))

    def forward(self, x):
        return functional.linear(x, self.packed.float() * self.scale)


class Packed(torch.Tensor):
    """A tensor subclass in an ordinary nn.Linear, as torchao has it: it means twice its numbers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, bias = args
            return functional.linear(x, 2 * weight.as_subclass(torch.Tensor), bias)
        return super().__torch_function__(func, types, args, kwargs or {})


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 3 * self.lora_B(self.lora_A(x))


def packed(old):
    old.weight = nn.Parameter(old.weight.detach().as_subclass(Packed), requires_grad=False)
    assert type(old) is nn.Linear and isinstance(old.weight, Packed)
    return old


def hooked(old):
    old.register_forward_hook(lambda module, args, out: 1.5 * out)
    return old


def with_own_forward(old):
    """As accelerate's hooks do it."""
    old.forward = lambda x: 1.5 * functional.linear(x, old.weight)
    return old


@pytest.fixture
def weights_used(monkeypatch):
    """Shapes of the weights that the kernel was given; every eligible layer counts as faster."""
    used = []
    kernel = linear.linear_small_m

    def counting(x, weight, bias=None):
        used.append(weight)
        return kernel(x, weight, bias)

    use_as_kernel(monkeypatch, counting)
    monkeypatch.setattr(linear, "_measured", {})
    monkeypatch.setattr(linear, "_gain", lambda modules, rows: 10.0)
    return used


def replace(model, change):
    """Every down_proj by `change` of it; the weights that the kernel must not be given."""
    for layer in model.model.layers:
        layer.mlp.down_proj = change(layer.mlp.down_proj)


def replaced_weights(model):
    return {getattr(layer.mlp.down_proj, "weight", None) for layer in model.model.layers}


@pytest.mark.parametrize("change", [Int8Linear, packed, with_own_forward])
def test_foreign_layers_keep_their_forward(change, weights_used):
    model = fresh("llama")
    replace(model, change)
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)
    forwards = [vars(layer.mlp.down_proj).get("forward") for layer in model.model.layers]
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs) == expected
    assert metrics.num_accepted_tokens > 0
    assert len({id(w) for w in weights_used}) == 2 * 6 + 1
    assert not {id(w) for w in weights_used} & {id(w) for w in replaced_weights(model)}
    assert forwards == [vars(layer.mlp.down_proj).get("forward") for layer in model.model.layers]


@pytest.mark.parametrize("change, layers", [(Lora, 2 * 9 + 1), (hooked, 2 * 7 + 1)])
def test_plain_layers_in_wrappers_and_under_hooks(change, layers, weights_used):
    """The linear layers that a wrapper is made of are plain ones; hooks run around any forward."""
    torch.manual_seed(4)
    model = fresh("llama")
    replace(model, change)
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs) == expected
    assert metrics.num_accepted_tokens > 0
    assert len({id(w) for w in weights_used}) == layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.qint8])
def test_dynamically_quantised_layers(dtype, weights_used):
    """float16 weights: token-equal. int8 scales activations by all rows of a call together, so the
    model itself answers differently for several slots at once; without drafts it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(fresh("llama"), {nn.Linear}, dtype=dtype)
    inputs = batch(lookup_rows(model)[:1])
    expected = new_tokens(model, inputs)
    options = {"method": "none"} if dtype == torch.qint8 else {"num_speculative_tokens": 8}
    with accelerated(model, **options):
        assert new_tokens(model, inputs) == expected
    assert weights_used == []


def test_forwards_between_ours_are_the_models_own(monkeypatch):
    """Modules stay flipped for a whole generation; a criterion's forward gets torch's layers."""
    model = fresh("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(ids).logits
    kernel = linear.linear_small_m
    use_as_kernel(monkeypatch, lambda *args: 1.001 * kernel(*args))
    monkeypatch.setattr(linear, "_measured", {})
    monkeypatch.setattr(linear, "_gain", lambda modules, rows: 10.0)
    seen = []

    class Ask(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            flipped = "forward" in vars(model.lm_head)
            seen.append((flipped, torch.equal(model(ids).logits, expected)))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with accelerated(model, num_speculative_tokens=4):
        new_tokens(model, batch([[2, 3, 4]]), max_new_tokens=12, stopping_criteria=[Ask()])
    assert seen[-1] == (True, True) and all(same for _, same in seen)
    assert not any("forward" in vars(module) for module in model.modules())
