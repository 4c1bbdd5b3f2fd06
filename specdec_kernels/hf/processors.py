"""What is known of logits processors: which forget their calls, and which come last."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp


def _those_that_exist(*names: str) -> tuple[type, ...]:
    return tuple(getattr(lp, name) for name in names if hasattr(lp, name))


# generate puts these behind the processors of the caller's own.
WARPERS = _those_that_exist(
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "WatermarkLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "LogitNormalization",
)

# These look at nothing but the prefix and the scores they are given.
STATELESS = _those_that_exist(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "TopHLogitsWarper",
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


def is_warper(processor: Any) -> bool:
    return type(processor) in WARPERS


def is_stateless(processor: Any) -> bool:
    """Whether its answer depends on the ids and scores of the call alone, row by row."""
    return type(processor) in STATELESS or bool(getattr(processor, "specdec_stateless", False))


def of_unknown_state(processors: Sequence[Any]) -> list[str]:
    """Names of processors that may remember earlier calls."""
    return [type(p).__name__ for p in processors if not is_stateless(p)]


def for_rows(
    processors: LogitsProcessorList, chosen: Sequence[int], batch: int
) -> LogitsProcessorList:
    """The processors for a call with some of the rows: per-row tensors are cut to those."""
    if list(chosen) == list(range(batch)):
        return processors
    return LogitsProcessorList(_cut(p, list(chosen), batch) for p in processors)


def _cut(processor: Any, chosen: list[int], batch: int) -> Any:
    lengths = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(lengths, Tensor) or lengths.shape != (batch,):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = lengths[chosen]
    return processor
