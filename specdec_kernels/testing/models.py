"""What a real model's logits can decide: near ties, and drift with the number of rows.

A model is a transformers-style module, which takes `input_ids` and `past_key_values` (or `cache`)
and returns `.logits` and the new cache, or a function, as each docstring says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NearTies(NamedTuple):
    """Emitted tokens against the argmax of the logits that the same text gives.

    gaps: the largest logit less the emitted token's, fp32 [n]. argmax: int64 [n], the lowest id of
    equals. emitted: int64 [n].
    """

    gaps: Tensor
    argmax: Tensor
    emitted: Tensor

    @property
    def differing(self) -> list[int]:
        """Indices of the emitted tokens that are not the argmax."""
        return (self.argmax != self.emitted).nonzero()[:, 0].tolist()

    @property
    def largest_gap(self) -> float:
        return float(self.gaps.max()) if len(self.gaps) else 0.0

    def __str__(self) -> str:
        lines = [
            f"token {i}: emitted {int(self.emitted[i])}, argmax {int(self.argmax[i])}, "
            f"gap {float(self.gaps[i]):.3g}"
            for i in self.differing
        ]
        counts = f"{len(lines)} of {len(self.gaps)} tokens are not the argmax"
        return "\n".join([*lines, f"{counts}; largest gap {self.largest_gap:.3g}"])


class LogitDrift(NamedTuple):
    """Logits of the same positions computed one at a time and several at once.

    difference: the largest absolute one of each position, fp32 [n]. gaps: largest less second
    largest logit, one at a time. changed: whether the argmax is another, bool [n].
    """

    difference: Tensor
    gaps: Tensor
    changed: Tensor

    @property
    def max_difference(self) -> float:
        return float(self.difference.max()) if len(self.difference) else 0.0

    @property
    def argmax_changes(self) -> int:
        return int(self.changed.sum())

    def __str__(self) -> str:
        where = f"{self.argmax_changes} of {len(self.changed)} argmaxes change"
        if self.argmax_changes:
            where += f", at gaps up to {float(self.gaps[self.changed].max()):.3g}"
        return f"logits differ by up to {self.max_difference:.3g}; {where}"


@torch.no_grad()
def near_ties(logits_of: Any, prompt_ids: Tensor, emitted_ids: Tensor) -> NearTies:
    """Whether greedy text is that of the model, up to ties: teacher forcing in one forward.

    Args:
        logits_of: a model, or a function from ids [1, S] to logits [1, S, V].
        prompt_ids, emitted_ids: of one row, int64 [P] and [n] (or [1, P] and [1, n]), no padding.
    """
    prompt, emitted = prompt_ids.flatten(), emitted_ids.flatten()
    ids = torch.cat([prompt, emitted.to(prompt.device)]).unsqueeze(0)
    found = logits_of(input_ids=ids) if isinstance(logits_of, torch.nn.Module) else logits_of(ids)
    logits = getattr(found, "logits", found)[0, len(prompt) - 1 : -1].float()
    emitted = emitted.to(logits.device)
    said = logits.gather(1, emitted.unsqueeze(1)).squeeze(1)
    return NearTies(logits.amax(1) - said, logits.argmax(1), emitted)


# (ids [1, m], state) to (logits [1, m, V], state behind them); None is the state of an empty text.
Forward = Callable[[Tensor, Any], tuple[Tensor, Any]]


@torch.no_grad()
def logit_drift(model: Any, ids: Tensor, k: int) -> LogitDrift:
    """What verifying k drafts at once does to the logits that plain decoding would have had.

    The text is read twice behind the same start, token by token and k + 1 tokens at a time, each
    time with the cache of its own steps.

    Args:
        model: a model, or a function from (ids [1, m], state) to (logits [1, m, V], new state).
        ids: the text, int64 [S] or [1, S], longer than k + 1. k: drafts per verification.
    """
    ids = ids.reshape(1, -1)
    start = (ids.shape[1] - 1) % (k + 1) + 1
    if ids.shape[1] <= k + 1:
        raise ValueError(f"logit_drift: expected more than {k + 1} tokens, got {ids.shape[1]}")
    forward = _cached(model) if isinstance(model, torch.nn.Module) else model
    single, several = (_read(forward, ids, start, size) for size in (1, k + 1))
    best = single.topk(2, -1).values
    return LogitDrift(
        (single - several).abs().amax(-1),
        best[:, 0] - best[:, 1],
        single.argmax(-1) != several.argmax(-1),
    )


def _cached(model: torch.nn.Module) -> Forward:
    # The newest transformers call it cache.
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"

    def forward(ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        found = model(input_ids=ids, use_cache=True, **{name: state})
        return found.logits, getattr(found, name)

    return forward


def _read(forward: Forward, ids: Tensor, start: int, size: int) -> Tensor:
    """fp32 logits [S - start, V] behind the first `start` tokens, `size` tokens at a time."""
    _, state = forward(ids[:, :start], None)
    logits = []
    for block in ids[:, start:].split(size, 1):
        found, state = forward(block, state)
        logits.append(found[0].float())
    return torch.cat(logits)
