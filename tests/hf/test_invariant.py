"""linear="invariant": a position's logits have the same bits however many are computed at once."""

import contextlib
import warnings

import pytest
import torch
import transformers
from test_families import ALL
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, random_rows, use_as_kernel
from torch import nn
from torch.nn import functional
from windows import Windows

import specdec_kernels as sdk
from specdec_kernels import native
from specdec_kernels.dispatch import use_backend
from specdec_kernels.hf import linear
from specdec_kernels.hf.invariant import EXACT, Survey, by_rows

pytestmark = pytest.mark.skipif(native.cpu is None, reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (*range(1, 18), 31, 32, 33, 48, 49, 63, 64)
ONE_ARGUMENT = {
    *("neg", "abs", "sqrt", "reciprocal", "square", "sign", "floor", "ceil", "round"),
    *("exp", "tanh", "cos", "sin", "erf", "log", "log1p"),
}
LENGTHS = (1, 2, 3, 5, 8, 16, 31, 48, None)


def differing_sizes(model, sizes=SIZES):
    """Window sizes whose logits differ from those of one slot at a time; no warning may come."""
    with accelerated(model, linear="invariant"):
        windows = Windows(model, random_rows((20, 7, 33)))
        tokens = torch.tensor(random_rows((max(sizes),) * 3, seed=5))
        alone = windows.one_by_one(tokens)
        assert alone.isfinite().all()
        return [n for n in sizes if not torch.equal(windows.at_once(tokens[:, :n]), alone[:, :n])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_logits_of_chains_do_not_depend_on_the_window(name, dtype):
    assert differing_sizes(fresh(name).to(dtype)) == []


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads(threads):
    """Rows of 1536 numbers: torch cuts their activations between threads, in the middle of rows."""
    with num_threads(threads):
        assert differing_sizes(fresh("llama", intermediate_size=1536), (8, 23, 64)) == []


@pytest.mark.parametrize(
    "name, target, fault",
    [
        ("llama", "layers.by_rows", lambda function, x: function(x)),
        pytest.param(
            *("qwen3_moe", "layers.RowWise", contextlib.nullcontext),
            marks=pytest.mark.skipif(
                transformers.__version__ < "5", reason="its routers are nn.Linear there"
            ),
        ),
    ],
)
def test_without_a_remedy_the_bits_differ(name, target, fault, monkeypatch):
    monkeypatch.setattr(f"specdec_kernels.hf.{target}", fault)
    assert differing_sizes(fresh(name)) != []


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_drafting_changes_no_token(name, dtype, rows, sample):
    """200 tokens, greedy and sampled: chains of every length against the loop without drafts."""
    model = fresh(name).to(dtype)
    inputs = batch(lookup_rows(model)[:rows])
    options = dict(max_new_tokens=200, do_sample=sample, temperature=0.2 if sample else None)
    config = dict(linear="invariant", seed=7)
    with accelerated(model, method="none", **config):
        expected = new_tokens(model, inputs, **options)
    for length in LENGTHS if name == "llama" else (8, None):
        with accelerated(model, num_speculative_tokens=length, **config) as metrics:
            assert new_tokens(model, inputs, **options) == expected, length
        assert length is None or metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("function", [functional.silu, functional.gelu, torch.sigmoid])
@pytest.mark.parametrize("dtype", DTYPES)
def test_by_rows_gives_each_row_what_it_gets_alone(function, dtype):
    generator = torch.Generator().manual_seed(0)
    for threads in (1, 2, 3, 5):
        for width in (1, 48, 63, 64, 1536, 33000):
            x = torch.randn(35, 2 * width, generator=generator).to(dtype)[:, :width]
            with num_threads(threads):
                alone = torch.cat([by_rows(function, row[None]) for row in x])
                for rows in (1, 2, 3, 17, 22, 35):
                    assert torch.equal(by_rows(function, x[:rows]), alone[:rows])


EXACT_CALLS = {
    **{name: getattr(torch, name) for name in EXACT if name in ONE_ARGUMENT},
    "relu": functional.relu,
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "add": lambda x: x + x.flip(-1) + 0.3,
    "sub": lambda x: 0.3 - (x - x.flip(-1) - 0.1),
    "mul": lambda x: x * x.flip(-1) * 0.7,
    "div": lambda x: x.flip(-1) / x / 0.3,
    "pow": lambda x: x.pow(2) + x.pow(3),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(EXACT_CALLS))
def test_exact_operations_need_no_remedy(name, dtype):
    """An element has the same bits in a vector, left over, alone and between strides."""
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.abs() if name in ("sqrt", "log", "log1p") else x
    pairs = torch.stack([x, x.flip(-1)], -1)  # what is combined stays together
    function = EXACT_CALLS[name]
    expected = function(pairs)
    for length in (1, 3, 17, 31, 33):
        parts = [function(part) for part in pairs.split(length, 1)]
        assert torch.equal(torch.cat(parts, 1).nan_to_num(), expected.nan_to_num())
    strided = pairs.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(function(strided).nan_to_num(), expected.nan_to_num())


@contextlib.contextmanager
def num_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_it_uses_the_kernel_whatever_is_faster(monkeypatch):
    """Every linear layer, those with biases and the tied head too, at windows of any size."""
    calls = []

    def counting(x, weight, bias=None):
        calls.append((x.numel() // x.shape[-1], weight.data_ptr(), bias is not None))
        return linear.reference(x, weight, bias)

    monkeypatch.setattr(linear, "reference", linear.linear_small_m, raising=False)
    use_as_kernel(monkeypatch, counting)
    monkeypatch.setattr(linear, "_gain", lambda modules, rows: 0.5)
    model = fresh("qwen2", tie_word_embeddings=True)
    for mode, expected in (("auto", 0), ("invariant", 15)):
        with accelerated(model, linear=mode):
            windows = Windows(model, random_rows((9, 5, 7)))
            windows.at_once(torch.tensor(random_rows((30,) * 3)))
            calls.clear()
            windows.at_once(torch.tensor(random_rows((30,) * 3)))
        assert len(calls) == expected and all(rows == 90 for rows, *_ in calls)
    assert sum(biased for *_, biased in calls) == 6
    assert model.model.embed_tokens.weight.data_ptr() in {pointer for _, pointer, _ in calls}


class Doubled(nn.Linear):
    """Any subclass keeps its own forward."""

    def forward(self, x):
        return 2 * functional.linear(x, self.weight, self.bias)


def warning_of(model):
    with warnings.catch_warnings(record=True) as caught, sdk.patched(model, linear="invariant"):
        warnings.simplefilter("always")
        new_tokens(model, batch(random_rows((9,))), max_new_tokens=20)
    return [str(w.message) for w in caught if "invariant" in str(w.message)]


def test_layers_that_stay_torchs_are_named():
    model = fresh("llama")
    assert warning_of(model) == []
    for layer in model.model.layers:
        old = layer.mlp.down_proj
        layer.mlp.down_proj = Doubled(*reversed(old.weight.shape), bias=False)
    (text,) = warning_of(model)
    assert "cannot promise" in text and "model.layers.0.mlp.down_proj (Doubled)" in text


def test_a_forward_on_the_instance_is_named_and_kept():
    model = fresh("llama")
    head = model.lm_head
    head.forward = own = lambda x: functional.linear(x, head.weight)
    (text,) = warning_of(model)
    assert "lm_head (Linear) keeps its own forward" in text
    assert vars(head)["forward"] is own


def test_unknown_operations_are_named():
    class Odd(nn.Module):
        def forward(self, x):
            return functional.gelu(x) + torch.special.i0(x.float()).to(x.dtype) * 0

    model = fresh("llama")
    model.model.layers[1].mlp.act_fn = Odd()
    (text,) = warning_of(model)
    assert "model.layers.1.mlp.act_fn (Odd) runs i0" in text


def test_sums_over_rows_are_seen():
    class Mean(nn.Module):
        def forward(self, x):
            return x + x.mean((0, 1)) + x.cumsum(1)

    x = torch.randn(1, 3, 8)
    with Survey() as survey:
        Mean()(x)
    ((_, _, uneven),) = survey.uneven()
    assert uneven == {"unknown": {"mean", "cumsum"}}


def test_another_backend_is_named():
    with use_backend("reference"):
        (text,) = warning_of(fresh("llama"))
    assert "needs the backend cpu, not reference" in text


def test_drafts_are_chains_unless_trees_are_asked_for():
    config = sdk.SpeculativeConfig
    assert config(linear="invariant").matches_in_draft == 1
    assert config(linear="invariant", prompt_lookup_matches=2).matches_in_draft == 2
    assert config().matches_in_draft == 3
    assert config(rule="block", prompt_lookup_matches=2).matches_in_draft == 1


def test_conv1d_follows_its_weight():
    """The transposed copy is made anew when the weight changes."""
    model = fresh("gpt2")
    inputs = batch(random_rows((9,)))
    with accelerated(model, linear="invariant", method="none"):
        before = new_tokens(model, inputs)
        for parameter in model.transformer.h.parameters():
            parameter.data.mul_(1.5)
        after = new_tokens(model, inputs)
    assert before != after
    assert after == new_tokens(model, inputs)
