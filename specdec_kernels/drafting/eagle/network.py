"""The network of an EAGLE head: a decoder layer over the next token and what the target thought.

Slot i of a head reads token i + 1 together with the target's hidden state of token i, and says
what follows token i + 1. Where the target has not been yet, the head's own output of the slot
before stands in for its hidden state.
Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and
"EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test", 2024 and 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.ops.rms_norm import rms_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class HeadConfig:
    """What the weights do not say.

    fused: EAGLE-3: `fc` joins hidden states of several layers of the target, and the first layer
        reads token and hidden state side by side. Otherwise EAGLE-1 and 2: `fc` joins the token and
        the target's last hidden state, and the output goes to the target's lm_head as it is.
    hidden_layers: ids of the target's hidden states, see `Drafter`.
    target_hidden_size: of one of them. num_layers: of the head itself.
    vocab_size, draft_vocab_size: of the target, and how many of its tokens can be drafted.
    norm_before_fc: one norm over all hidden states. fc_norm: one for each.
    norm_before_residual: the first residual is the normed hidden state.
    norm_output: the next slot is given the normed output.
    inv_freq, rope_scale: frequencies fp32 [D / 2] and factor of the rotary embedding.
    window: sliding window in positions. max_positions: None without a limit.
    """

    fused: bool
    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    inv_freq: Tensor
    rope_scale: float = 1.0
    eps: float = 1e-6
    activation: str = "silu"
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None
    max_positions: int | None = None


class Slots(NamedTuple):
    """Where a forward stands. attend: K and V of a layer in, with q; attention's output back."""

    positions: Tensor
    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """names: weights of the checkpoint, which tell about biases and norms of queries and keys."""

    def __init__(self, config: HeadConfig, index: int, names: Container[str]):
        super().__init__()
        self.config, self.index = config, index
        d, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        wide = 2 * d if config.fused and index == 0 else d

        def linear(name: str, size: int, out: int) -> nn.Linear:
            bias = f"layers.{index}.self_attn.{name}.bias" in names
            return nn.Linear(size, out, bias=bias, device="meta")

        self.q_proj = linear("q_proj", wide, heads * dim)
        self.k_proj = linear("k_proj", wide, config.num_kv_heads * dim)
        self.v_proj = linear("v_proj", wide, config.num_kv_heads * dim)
        self.o_proj = linear("o_proj", heads * dim, d)
        normed = f"layers.{index}.self_attn.q_norm.weight" in names
        self.q_norm = Norm(dim, config.eps) if normed else nn.Identity()
        self.k_norm = Norm(dim, config.eps) if normed else nn.Identity()

    def forward(self, x: Tensor, slots: Slots) -> Tensor:
        """x [B, T, d or 2 d]."""
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q, k = self.q_norm(self.q_proj(x).view(heads)), self.k_norm(self.k_proj(x).view(heads))
        angles = slots.positions[..., None, None] * self.config.inv_freq
        cos, sin = (f(angles) * self.config.rope_scale for f in (torch.cos, torch.sin))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        v = self.v_proj(x).view(heads)
        return self.o_proj(slots.attend(self.index, q, k, v).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, config: HeadConfig, index: int, names: Container[str]):
        super().__init__()
        d, wide = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]

        def linear(name: str, size: int, out: int) -> nn.Linear:
            bias = f"layers.{index}.mlp.{name}.bias" in names
            return nn.Linear(size, out, bias=bias, device="meta")

        self.gate_proj = linear("gate_proj", d, wide)
        self.up_proj = linear("up_proj", d, wide)
        self.down_proj = linear("down_proj", wide, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: HeadConfig, index: int, names: Container[str]):
        super().__init__()
        self.first, self.config = index == 0, config
        if config.fused and self.first:
            self.hidden_norm = Norm(config.hidden_size, config.eps)
        if config.fused or not self.first:
            self.input_layernorm = Norm(config.hidden_size, config.eps)
        self.self_attn = Attention(config, index, names)
        self.post_attention_layernorm = Norm(config.hidden_size, config.eps)
        self.mlp = Mlp(config, index, names)

    def forward(self, embedded: Tensor, hidden: Tensor, slots: Slots) -> Tensor:
        residual = hidden
        if self.config.fused and self.first:
            hidden = self.hidden_norm(hidden)
            residual = hidden if self.config.norm_before_residual else residual
            hidden = torch.cat([self.input_layernorm(embedded), hidden], -1)
        elif not self.first:
            hidden = self.input_layernorm(hidden)
        residual = residual + self.self_attn(hidden, slots)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Head(nn.Module):
    """An EAGLE head without its weights: `load_state_dict(..., assign=True)` brings them.

    target_ids: target id of each draft id, int64 [Vd]; None means equal ids.
    """

    least_text = 2

    def __init__(self, config: HeadConfig, names: Container[str], target_ids: Tensor | None):
        super().__init__()
        self.config, self.target_ids = config, target_ids
        self.hidden_layers, self.max_positions = config.hidden_layers, config.max_positions
        self.carried, self.vocab_size = config.hidden_size, config.vocab_size
        d, eps = config.hidden_size, config.eps
        states = len(config.hidden_layers)
        wide = states * config.target_hidden_size
        self.fc = nn.Linear(
            wide if config.fused else 2 * d, d, bias="fc.bias" in names, device="meta"
        )
        if config.norm_before_fc:
            self.input_norm = Norm(wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                Norm(config.target_hidden_size, eps) for _ in range(states)
            )
        self.layers = nn.ModuleList(Layer(config, i, names) for i in range(config.num_layers))
        if config.fused:
            self.norm = Norm(d, eps)
        self.lm_head = nn.Linear(
            d, config.draft_vocab_size, bias="lm_head.bias" in names, device="meta"
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, d, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """What the target's hidden states [..., L * d_target] are to the layers: [..., d]."""
        config = self.config
        if not config.fused:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.split(config.target_hidden_size, -1)
            features = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(self, ids: Tensor, hidden: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """ids int64 [B, T], hidden [B, T, d]: what `lm_head` reads, and the next slots' hidden."""
        embedded = functional.embedding(ids, self.embed_tokens.weight)
        if not self.config.fused:
            hidden = self.fc(torch.cat([embedded, hidden], -1))
        for layer in self.layers:
            hidden = layer(embedded, hidden, slots)
        if not self.config.fused:
            return hidden, hidden
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden
