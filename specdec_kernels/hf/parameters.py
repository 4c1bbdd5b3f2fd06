"""Logits processors that the kernels reproduce, as their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from specdec_kernels.decoding.history import TokenHistory
from specdec_kernels.hf.grammar import names_allowed_tokens
from specdec_kernels.hf.penalties import OccurrencePenalties
from specdec_kernels.tree import SamplingParams

# In this order, each at most once. Tokens may be forbidden anywhere before the first filter.
BIAS, REPETITION, OCCURRENCE, TEMPERATURE, TOP_K, TOP_P, MIN_P = range(7)


@dataclass
class KernelParameters:
    """What a list of processors does, for one batch.

    bias: added to single tokens, -infinity forbids. ignored: per row, how many ids from the left,
    padding included, are no text to the repetition penalty. maskers: see `grammar`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float | None = None
    ignored: list[int] = field(default_factory=list)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    maskers: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether the logits or the choice are changed at all."""
        return self != KernelParameters(ignored=self.ignored)

    @property
    def counts(self) -> bool:
        """Whether the text so far matters."""
        return bool(
            self.repetition_penalty is not None or self.presence_penalty or self.frequency_penalty
        )

    def sampling(self, seeds: list[int], device: torch.device) -> SamplingParams:
        """One row per seed, without the lists that `history` keeps."""
        batch = len(seeds)

        def full(value: float) -> Tensor:
            return torch.full((batch,), value, dtype=torch.float32, device=device)

        sampling = SamplingParams.make(
            batch,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seeds,
            device=device,
        )
        repetition = self.repetition_penalty
        return sampling._replace(
            repetition_penalty=None if repetition is None else full(repetition),
            presence_penalty=full(self.presence_penalty) if self.presence_penalty else None,
            frequency_penalty=full(self.frequency_penalty) if self.frequency_penalty else None,
        )

    def history(self, padded: list[list[int]], device: torch.device) -> TokenHistory | None:
        """The token lists of the prompts; None when there is nothing to list."""
        if not self.counts and not self.bias:
            return None
        seen: list[list[int]] = [[] for _ in padded]
        if self.repetition_penalty is not None:
            seen = [row[n:] for row, n in zip(padded, self.ignored, strict=True)]
        return TokenHistory(seen, self.bias, device, counts=self.counts)


def kernel_parameters(
    processors: Sequence[Any], padded: list[list[int]], vocab: int, *, warpers: bool
) -> KernelParameters | None:
    """None when some processor, or their order, is not what the kernels compute.

    padded: the prompts as generate holds them. warpers: whether temperature and filters may occur.
    """
    found = KernelParameters()
    rank = -1
    for processor in processors:
        if _forbids(processor, vocab, found) or _masks(processor, found):
            if rank >= TOP_K:
                return None
            continue
        read = READERS.get(type(processor))
        if read is None or read[0] <= rank or not read[1](processor, padded, vocab, found):
            return None
        rank = read[0]
        if rank >= TEMPERATURE and not warpers:
            return None
    return found


def _forbids(processor: Any, vocab: int, found: KernelParameters) -> bool:
    """Takes over processors that do nothing but forbid single tokens."""
    if type(processor) is lp.SuppressTokensLogitsProcessor:
        tokens = processor.suppress_tokens.tolist()
    elif type(processor) in (lp.SequenceBiasLogitsProcessor, lp.NoBadWordsLogitsProcessor):
        bias = _single_tokens(processor, vocab)
        if bias is None or any(value != -math.inf for value in bias.values()):
            return False
        tokens = list(bias)
    else:
        return False
    found.bias.update(dict.fromkeys(tokens, -math.inf))
    return True


def _masks(processor: Any, found: KernelParameters) -> bool:
    if not names_allowed_tokens(processor):
        return False
    found.maskers.append(processor)
    return True


def _single_tokens(processor: Any, vocab: int) -> dict[int, float] | None:
    """The biases; None with longer sequences, or with tokens that the processor would refuse."""
    bias: dict[int, float] = {}
    for sequence, value in processor.sequence_bias.items():
        if len(sequence) != 1 or sequence[0] >= vocab or not value < math.inf:
            return None
        bias[int(sequence[0])] = float(value)
    return bias


Padded = list[list[int]]


def _read_bias(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    bias = _single_tokens(processor, vocab)
    for token, value in (bias or {}).items():
        found.bias[token] = found.bias.get(token, 0.0) + value
    return bias is not None


def _read_repetition(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    lengths = processor.prompt_ignore_length
    per_row = isinstance(lengths, Tensor)
    found.ignored = lengths.tolist() if per_row else [int(lengths or 0)] * len(padded)
    found.repetition_penalty = float(processor.penalty)
    return len(found.ignored) == len(padded) and max(found.ignored) <= len(padded[0])


def _read_occurrence(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    found.presence_penalty, found.frequency_penalty = processor.presence, processor.frequency
    return processor.prompt_length == len(padded[0])


def _read_temperature(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    found.temperature = float(processor.temperature)
    return True


def _read_top_k(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    found.top_k = int(processor.top_k)
    return _removes_all(processor)


def _read_top_p(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    found.top_p = float(processor.top_p)
    return _removes_all(processor) and processor.min_tokens_to_keep == 1


def _read_min_p(processor: Any, padded: Padded, vocab: int, found: KernelParameters) -> bool:
    found.min_p = float(processor.min_p)
    return _removes_all(processor) and processor.min_tokens_to_keep == 1


def _removes_all(processor: Any) -> bool:
    return processor.filter_value == -math.inf


READERS = {
    lp.SequenceBiasLogitsProcessor: (BIAS, _read_bias),
    lp.RepetitionPenaltyLogitsProcessor: (REPETITION, _read_repetition),
    OccurrencePenalties: (OCCURRENCE, _read_occurrence),
    lp.TemperatureLogitsWarper: (TEMPERATURE, _read_temperature),
    lp.TopKLogitsWarper: (TOP_K, _read_top_k),
    lp.TopPLogitsWarper: (TOP_P, _read_top_p),
    lp.MinPLogitsWarper: (MIN_P, _read_min_p),
}
