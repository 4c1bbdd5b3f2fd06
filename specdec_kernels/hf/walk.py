"""Plain decoding steps along drafted paths: transformers' own processors, one token per row."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec_kernels.hf.processors import for_rows
from specdec_kernels.hf.text import PaddedText
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import SamplingParams


class Walk:
    """Chooses tokens from raw logits as plain generate would, for some rows at a time.

    sampling: per row; None is greedy, or torch's generator with `multinomial`.
    scores, logits: per row what was kept of each emitted token, [1, V] each.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        text: PaddedText,
        sampling: SamplingParams | None,
        *,
        multinomial: bool = False,
        keeps_scores: bool = False,
        keeps_logits: bool = False,
    ):
        self.processors = processors
        self.text = text
        self.sampling = sampling
        self.multinomial = multinomial
        self.keeps_scores, self.keeps_logits = keeps_scores, keeps_logits
        batch = len(text.rows)
        self.scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def pick(self, chosen: list[int], logits: Tensor) -> list[int]:
        """The next tokens of rows `chosen` from their logits [n, V]."""
        raw = logits.to(torch.float32, copy=True)
        groups = self.text.by_length(chosen)
        if len(groups) == 1:
            scores = self._processed(chosen, raw)
        else:
            scores = torch.empty_like(raw)
            for group in groups:
                scores[group] = self._processed([chosen[i] for i in group], raw[group])
        for i, b in enumerate(chosen):
            if self.keeps_scores:
                self.scores[b].append(scores[i : i + 1])
            if self.keeps_logits:
                self.logits[b].append(raw[i : i + 1])
        return self._draw(chosen, scores).tolist()

    def _processed(self, chosen: list[int], raw: Tensor) -> Tensor:
        """One call of the processors, with rows of one length."""
        processors = for_rows(self.processors, chosen, len(self.text.rows))
        scores = raw.clone() if self.keeps_logits else raw
        return processors(self.text.ids(chosen), scores)

    def _draw(self, chosen: list[int], scores: Tensor) -> Tensor:
        if self.multinomial:
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        if self.sampling is None:
            return scores.argmax(-1)
        rows = self.text.rows
        position = torch.tensor([rows.length(b) for b in chosen], device=scores.device)
        return sample(scores, self.sampling.at(chosen)._replace(position=position))

    def kept(self) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Scores and logits, one [B, V] tensor per step; None for what was not asked for."""
        return (
            _stacked(self.scores) if self.keeps_scores else None,
            _stacked(self.logits) if self.keeps_logits else None,
        )


def _stacked(kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Rows that had finished by a step hold -infinity there."""
    empty = torch.full_like(kept[0][0], float("-inf"))
    longest = max(len(row) for row in kept)
    return tuple(
        torch.cat([row[t] if t < len(row) else empty for row in kept]) for t in range(longest)
    )
