"""What our kernels are measured against on a GPU: PyTorch, and the libraries that are installed.

All take their inputs as our cases have them. `flashinfer` and `sgl_kernel` are found when they can
be imported; what they need prepared on the host (FlashInfer's plan) is not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench import bench_tree_attention as attention
from bench.harness import Function
from bench.torch_sampling import Emitted
from bench.windows import Window

WORKSPACE = 256 << 20


@cache
def has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


# ---- attention


def attention_rivals(with_flex: bool) -> dict[str, Function]:
    rivals: dict[str, Function] = {
        "sdpa_bool": attention.sdpa_bool,
        "sdpa_folded": attention.sdpa_folded,
    }
    if with_flex:
        rivals["flex"] = flex
    if has("flashinfer"):
        rivals["flashinfer"] = flashinfer_attention
    return rivals


def flex(x: attention.Inputs) -> Tensor:
    return attention.flex(x._replace(block_mask=_block_mask(x.visible)))


_block_masks: dict[tuple[int, ...], Any] = {}


def _block_mask(visible: Tensor) -> Any:
    """Made once per shape, as all inputs of a shape have the same trees."""
    key = tuple(visible.shape)
    if key not in _block_masks:
        _block_masks.clear()
        _block_masks[key] = attention.block_mask(visible)
    return _block_masks[key]


def flashinfer_attention(x: attention.Inputs) -> Tensor:
    """The cache is taken for one page per row; the mask is over all keys."""
    wrapper = _planned(x)
    out = wrapper.run(x.q.reshape(-1, *x.q.shape[2:]), (x.k, x.v))
    return out.view(x.q.shape)


_wrappers: dict[tuple, Any] = {}


def _planned(x: attention.Inputs) -> Any:
    key = x.q.shape, x.k.shape, x.q.dtype
    if key not in _wrappers:
        flashinfer = importlib.import_module("flashinfer")
        batch, size, heads, dim = x.q.shape
        kv_heads, keys, device = x.k.shape[1], x.k.shape[2], x.q.device
        space = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND")
        rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            rows * size,
            rows,
            rows[:-1],
            torch.full((batch,), keys, dtype=torch.int32, device=device),
            heads,
            kv_heads,
            dim,
            keys,
            custom_mask=x.visible.flatten(),
            q_data_type=x.q.dtype,
            kv_data_type=x.k.dtype,
        )
        _wrappers.clear()
        _wrappers[key] = wrapper
    return _wrappers[key]


# ---- verification and sampling


def greedy_rivals() -> dict[str, Function]:
    found: dict[str, Function] = {"torch_argmax": torch_argmax}
    if has("sgl_kernel"):
        found["sgl_kernel"] = sgl_verify_greedy
    return found


def torch_argmax(x: Window) -> Tensor:
    """The largest logits alone: acceptance still has to follow."""
    return x.logits.argmax(-1)


def sgl_verify_greedy(x: Window) -> Tensor:
    kernels = importlib.import_module("sgl_kernel")
    batch, width = x.tokens.shape
    slots = torch.arange(width, device=x.tokens.device)
    index = torch.arange(batch * width, device=x.tokens.device).view(batch, width)
    after = torch.where(slots + 1 < width, slots + 1, -1).expand(batch, -1).contiguous()
    predicts = torch.zeros(batch * width, dtype=torch.int32, device=x.tokens.device)
    accepted = torch.full((batch, width), -1, dtype=torch.int32, device=x.tokens.device)
    counts = torch.zeros(batch, dtype=torch.int32, device=x.tokens.device)
    kernels.verify_tree_greedy(
        predicts, accepted, counts, x.tokens, index, after, torch.full_like(after, -1),
        x.logits.argmax(-1),
    )  # fmt: skip
    return counts


def rejection_rivals(shape: dict[str, Any]) -> dict[str, Function]:
    if shape["draft"] != "logits" or shape["rule"] != "token":
        return {}
    found: dict[str, Function] = {"torch_softmax": torch_chain}
    if has("flashinfer"):
        found["flashinfer"] = flashinfer_chain
    return found


def torch_chain(x: Window) -> Emitted:
    """Rejection sampling of chains in whole-tensor operations, without a look from the host."""
    assert x.draft_logits is not None
    target, draft = x.logits.float().softmax(-1), x.draft_logits.float().softmax(-1)
    drafted = x.tokens[:, 1:, None]
    p, q = (mass[:, :-1].gather(2, drafted).squeeze(2) for mass in (target, draft))
    accepted = (torch.rand_like(p) * q < p).long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, target.shape[2])
    chosen = target.gather(1, at).squeeze(1)
    lost = draft.gather(1, at).squeeze(1) * (accepted < p.shape[1])[:, None]
    rest = (chosen - lost).clamp_(min=0)
    last = (rest / torch.empty_like(rest).exponential_()).argmax(1)
    slots = torch.arange(x.tokens.shape[1], device=x.tokens.device)
    tokens = torch.where(slots < accepted[:, None], x.tokens.roll(-1, 1), -1)
    return Emitted(torch.where(slots == accepted[:, None], last[:, None], tokens), accepted)


def flashinfer_chain(x: Window) -> Tensor:
    sampling = importlib.import_module("flashinfer.sampling")
    assert x.draft_logits is not None
    target = x.logits.float().softmax(-1)
    draft = x.draft_logits[:, :-1].float().softmax(-1)
    return sampling.chain_speculative_sampling(draft, x.tokens[:, 1:].int(), target)[0]


def sample_rivals(shape: dict[str, Any]) -> dict[str, Function]:
    found: dict[str, Function] = {}
    if not {"top_k", "top_p"} & shape.keys():
        found["torch_softmax"] = torch_multinomial
    if has("flashinfer"):
        found["flashinfer"] = partial(flashinfer_sample, settings=shape)
    return found


def torch_multinomial(x: Any) -> Tensor:
    mass = x.logits.float().softmax(-1)
    return (mass / torch.empty_like(mass).exponential_()).argmax(1)


def flashinfer_sample(x: Any, settings: dict[str, Any]) -> Tensor:
    sampling = importlib.import_module("flashinfer.sampling")
    logits = x.logits.float() / settings["temperature"]
    if "top_k" in settings:
        return sampling.top_k_top_p_sampling_from_logits(
            logits, settings["top_k"], settings["top_p"]
        )
    if "top_p" in settings:
        return sampling.top_p_sampling_from_probs(logits.softmax(-1), settings["top_p"])
    return sampling.sampling_from_logits(logits)


# ---- lookup


def torch_unfold(x: Any, min_n: int, max_n: int, k: int) -> Tensor:
    """The latest place of the longest last n-gram, by comparing all windows of every length."""
    tokens, size = x.tokens, x.tokens.shape[1]
    starts = torch.arange(size, device=tokens.device)
    best = torch.full((len(tokens),), -1, device=tokens.device)
    for n in range(min_n, max_n + 1):
        same = (tokens.unfold(1, n, 1)[:, :-1] == tokens[:, None, -n:]).all(2)
        place = torch.where(same, starts[: same.shape[1]] + n, -1).amax(1)
        best = torch.where(place >= 0, place, best)
    reached = best[:, None] + torch.arange(k, device=tokens.device)
    drafts = tokens.gather(1, reached.clamp(0, size - 1)).long()
    return torch.where((best[:, None] >= 0) & (reached < size), drafts, -1)
