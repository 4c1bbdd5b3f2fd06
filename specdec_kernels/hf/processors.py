"""Which logits processors become kernel parameters, and how the others are called row by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from specdec_kernels.tree import SamplingParams

# These look at nothing but the prefix and the scores they are given.
STATELESS = tuple(
    getattr(lp, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "LogitNormalization",
    )
)
KERNEL_ORDER = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
)


def of_unknown_state(processors: Sequence[Any]) -> list[str]:
    """Names of processors that may remember earlier calls."""
    return [
        type(p).__name__
        for p in processors
        if type(p) not in STATELESS and not getattr(p, "specdec_stateless", False)
    ]


def kernel_parameters(processors: Sequence[Any]) -> dict[str, Any] | None:
    """temperature, top_k, top_p and min_p when these are all there is, in transformers' order."""
    parameters: dict[str, Any] = {}
    rank = -1
    for processor in processors:
        if type(processor) not in KERNEL_ORDER or KERNEL_ORDER.index(type(processor)) <= rank:
            return None
        rank = KERNEL_ORDER.index(type(processor))
        if rank > 0 and processor.filter_value != -float("inf"):
            return None
        if rank == 0:
            parameters["temperature"] = float(processor.temperature)
        elif rank == 1:
            parameters["top_k"] = int(processor.top_k)
        elif rank == 2 and processor.min_tokens_to_keep == 1:
            parameters["top_p"] = float(processor.top_p)
        elif rank == 3 and processor.min_tokens_to_keep == 1:
            parameters["min_p"] = float(processor.min_p)
        else:
            return None
    return parameters


def row_seeds(seed: int | tuple[int, ...] | None, batch: int) -> list[int]:
    """One seed per row: from torch's generator, counted up from an int, or as given."""
    if seed is None:
        return torch.randint(2**62, (batch,), dtype=torch.int64).tolist()
    if isinstance(seed, int):
        return [seed + b for b in range(batch)]
    if len(seed) != batch:
        raise ValueError(f"seed: expected one per row ({batch}), got {len(seed)}")
    return list(seed)


def make_sampling(seeds: list[int], device: torch.device, **parameters: Any) -> SamplingParams:
    return SamplingParams.make(len(seeds), seed=seeds, device=device, **parameters)


def per_row(processors: LogitsProcessorList, batch: int) -> list[LogitsProcessorList]:
    """The processors as each row calls them; per-batch tensors are cut to the row."""
    if batch == 1:
        return [processors]
    return [LogitsProcessorList(_for_row(p, b) for p in processors) for b in range(batch)]


def _for_row(processor: Any, b: int) -> Any:
    lengths = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(lengths, Tensor) or lengths.dim() == 0:
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = lengths[b : b + 1]
    return processor
