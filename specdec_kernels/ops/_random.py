"""The random numbers of csrc/common/philox.h in PyTorch, bit for bit.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Key: a 64-bit
seed. Counter words: position (low, high), stream, index // 4; the index picks one of four words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.ops import _numerics

ACCEPT, RESIDUAL, BONUS, DRAFT = range(4)
STREAMS = {"bonus": BONUS, "draft": DRAFT}

_MASK = 0xFFFFFFFF


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Ten rounds on four counter words and two key words: int64 tensors that hold 32 bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32 & _MASK) ^ c1 ^ k0, b & _MASK
        c2, c3 = (a >> 32 & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def to_uniform(words: Tensor) -> Tensor:
    """(w + 0.5) 2^-32 in fp32, at most 1 - 2^-24: never 0, never 1."""
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def uniforms(seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor:
    """The uniforms of index 0 .. count - 1, fp32 [*seed.shape, count]."""
    seed, position = seed.unsqueeze(-1), position.unsqueeze(-1)
    block = torch.arange((count + 3) // 4, device=seed.device).expand(*seed.shape[:-1], -1)
    counter = [position & _MASK, position >> 32 & _MASK, torch.full_like(seed, stream), block]
    words = philox([c.expand_as(block) for c in counter], [seed & _MASK, seed >> 32 & _MASK])
    return to_uniform(torch.stack(words, -1).flatten(-2)[..., :count])


def to_gumbel(uniform: Tensor) -> Tensor:
    """-log(-log1p(-u)): fp32 resolves u near 0, where the large values come from."""
    return -_numerics.log(-_numerics.log1p(-uniform))
