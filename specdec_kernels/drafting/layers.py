"""What the layers of small drafting networks are made of: those of a Llama or a Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.ops.rms_norm import rms_norm
from specdec_kernels.ops.rms_norm.reference import rms_norm as differentiable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What the weights of a layer do not say.

    inv_freq, rope_scale: frequencies fp32 [D / 2] and factor of the rotary embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Tensor
    rope_scale: float = 1.0
    eps: float = 1e-6
    activation: str = "silu"


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
        norm = differentiable if self.training else rms_norm
        return norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """wide: size of what it reads. names: weights of the checkpoint, which tell about biases and
    norms of queries and keys.
    """

    def __init__(self, config: LayerConfig, index: int, names: Container[str], wide: int):
        super().__init__()
        self.config, self.index = config, index
        heads, dim = config.num_heads, config.head_dim

        def linear(name: str, size: int, out: int) -> nn.Linear:
            bias = f"layers.{index}.self_attn.{name}.bias" in names
            return nn.Linear(size, out, bias=bias, device="meta")

        self.q_proj = linear("q_proj", wide, heads * dim)
        self.k_proj = linear("k_proj", wide, config.num_kv_heads * dim)
        self.v_proj = linear("v_proj", wide, config.num_kv_heads * dim)
        self.o_proj = linear("o_proj", heads * dim, config.hidden_size)
        normed = f"layers.{index}.self_attn.q_norm.weight" in names
        self.q_norm = Norm(dim, config.eps) if normed else nn.Identity()
        self.k_norm = Norm(dim, config.eps) if normed else nn.Identity()

    def forward(self, x: Tensor, slots: Slots) -> Tensor:
        """x [B, T, wide]."""
        rotate = self._rotation(slots.positions)
        q = rotate(self.q_norm(self._heads(self.q_proj(x))))
        k = rotate(self.k_norm(self._heads(self.k_proj(x))))
        v = self._heads(self.v_proj(x))
        return self.o_proj(slots.attend(self.index, q, k, v).flatten(2))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, T, Hkv, D] of x at positions [B, T]."""
        k = self.k_norm(self._heads(self.k_proj(x)))
        return self._rotation(positions)(k), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.config.head_dim)

    def _rotation(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        angles = positions[..., None, None] * self.config.inv_freq
        cos, sin = (f(angles) * self.config.rope_scale for f in (torch.cos, torch.sin))

        def rotated(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, -1)
            turned = [first * cos - second * sin, second * cos + first * sin]
            return torch.cat(turned, -1).to(x.dtype)

        return rotated


class Mlp(nn.Module):
    def __init__(self, config: LayerConfig, index: int, names: Container[str]):
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
