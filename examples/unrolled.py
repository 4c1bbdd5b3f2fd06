"""Training as drafting goes: every step reads what the step before made of itself.

Step k of slot i reads token i + k and the output of step k - 1 of the same slot. Its attention sees
what drafting will show it: slots 0 to i as step 1 made them, which reads true hidden states, and
its own slot of the steps in between.
Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specdec_kernels.drafting.layers import Slots


class Batch(NamedTuple):
    """Texts padded behind: ids int64 [B, S], features [B, S, L * d], last [B, S, d], lens [B]."""

    ids: Tensor
    features: Tensor
    last: Tensor
    lens: Tensor


class Unrolled:
    """Attention of all steps over the slots of a batch."""

    def __init__(self, head_dim: int):
        self.scale = head_dim**-0.5
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, Hq, D], k and v [B, T, Hkv, D] of the next step."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(k)
        values.append(v)
        grouped = q.unflatten(2, (k.shape[2], -1)).transpose(1, 2)  # [B, Hkv, T, G, D]
        width = q.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
        scores = torch.einsum("bhtgd,bshd->bhgts", grouped, keys[0]) * self.scale
        scores = scores.float().masked_fill(~causal, -torch.inf)
        own = [
            torch.einsum("bhtgd,bthd->bhgt", grouped, later).float() * self.scale
            for later in keys[1:]
        ]
        weights = torch.cat([scores, *(s[..., None] for s in own)], -1).softmax(-1).to(v.dtype)
        out = torch.einsum("bhgts,bshd->bthgd", weights[..., :width], values[0])
        for step, later in enumerate(values[1:]):
            share = weights[..., width + step].permute(0, 3, 1, 2)  # [B, T, Hkv, G]
            out = out + share[..., None] * later[:, :, :, None]
        return out.flatten(2, 3)


def steps(
    network: Any, batch: Batch, number: int, hidden: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per step what `lm_head` reads [B, T, d], the target's state for the same token, the slots.

    hidden [B, S, d]: what the network makes of the batch's features. The slots are those whose
    token lies inside of the text, bool [B, T].
    """
    unrolled = Unrolled(network.config.head_dim)
    width = batch.ids.shape[1] - 1
    slots = torch.arange(width, device=batch.ids.device)
    ids = functional.pad(batch.ids, (0, number))
    last = functional.pad(batch.last, (0, 0, 0, number))
    hidden = hidden[:, :width]
    for step in range(1, number + 1):
        read = ids[:, step : step + width]
        positions = (slots + step - 1).expand(len(ids), -1)
        out, hidden = network(read, hidden, Slots(positions, unrolled.attend))
        inside = slots + step < batch.lens[:, None]
        yield out, last[:, step : step + width], inside


def loss(
    network: Any,
    batch: Batch,
    number: int,
    decay: float,
    logits: Callable[[Tensor], Tensor],
    target_logits: Callable[[Tensor], Tensor],
) -> Tensor:
    """Mean cross entropy with the target's distribution over the draft vocabulary.

    Step k counts decay ** (k - 1). logits, target_logits: of the head's output and of the target's
    last state, both [N, d], over the draft vocabulary.
    """
    total = batch.features.new_zeros((), dtype=torch.float32)
    for step, (out, last, inside) in enumerate(
        steps(network, batch, number, network.fuse(batch.features))
    ):
        with torch.no_grad():
            wanted = target_logits(last[inside]).float().softmax(-1)
        found = logits(out[inside]).float().log_softmax(-1)
        total = total - decay**step * (wanted * found).sum(-1).mean()
    return total


@torch.no_grad()
def agreement(
    network: Any,
    batches: Iterator[Batch],
    number: int,
    drafted: Callable[[Tensor], Tensor],
    wanted: Callable[[Tensor], Tensor],
) -> list[float]:
    """How often each step's likeliest token is the target's, the tokens before being so.

    drafted, wanted: the likeliest target ids [N] by the head's output and by the target's state.
    """
    right, total = [0] * number, [0] * number
    for batch in batches:
        found = steps(network, batch, number, network.fuse(batch.features))
        so_far = None
        for step, (out, last, inside) in enumerate(found):
            same = torch.zeros_like(inside)
            same[inside] = drafted(out[inside]) == wanted(last[inside])
            counted = inside if so_far is None else inside & so_far
            right[step] += int((same & counted).sum())
            total[step] += int(counted.sum())
            so_far = same & counted
    return [r / max(t, 1) for r, t in zip(right, total, strict=True)]
