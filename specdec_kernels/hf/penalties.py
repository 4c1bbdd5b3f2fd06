"""presence_penalty and frequency_penalty of a generation config, which transformers ignores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from specdec_kernels.hf.processors import is_warper

NAMES = ("presence_penalty", "frequency_penalty")


class OccurrencePenalties(LogitsProcessor):
    """Subtracts from the logits of generated tokens, the prompt's not counted.

    presence: once. frequency: once per occurrence. prompt_length: of the padded prompts.
    """

    specdec_stateless = True

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency = presence, frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[:, self.prompt_length :].clamp(max=scores.shape[-1])
        counts = scores.new_zeros(len(scores), scores.shape[-1] + 1)
        counts = counts.scatter_add(1, new, torch.ones_like(new, dtype=scores.dtype))[:, :-1]
        scores = torch.where(counts > 0, scores - self.frequency * counts, scores)
        return torch.where(counts > 0, scores - self.presence, scores)


def with_penalties(
    processors: LogitsProcessorList, config: GenerationConfig, prompt_length: int
) -> LogitsProcessorList:
    """The processors, with the config's penalties as the last ones before the warpers."""
    presence, frequency = (_value(config, name) for name in NAMES)
    if not presence and not frequency:
        return processors
    at = next((i for i, p in enumerate(processors) if is_warper(p)), len(processors))
    own = OccurrencePenalties(presence, frequency, prompt_length)
    return LogitsProcessorList([*processors[:at], own, *processors[at:]])


def _value(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"generate: expected {name} as a finite number, got {value!r}")
    return float(value)
