"""The sparse token lists of SamplingParams, kept up to date token by token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specdec_kernels.tree import SamplingParams

GROWTH = 256
FREE = -1  # token id of an unused place, outside every vocabulary
NOT_IN_TEXT = -1  # count of a token that has a bias but does not occur


class TokenHistory:
    """One list per row: tokens that have a bias or occur in the text, ascending by id.

    prompts: per row the tokens that count as text but not as generated.
    bias: what is added to the logits of single tokens, the same in every row; -infinity forbids.
    counts: whether the text matters at all; otherwise only the biases are listed.
    """

    def __init__(
        self,
        prompts: Sequence[Iterable[int]],
        bias: Mapping[int, float],
        device: torch.device,
        counts: bool = True,
    ):
        self.counts = counts
        self.bias = dict(bias)
        self.device = device
        texts = [set(prompt) for prompt in prompts]
        self._ids = [sorted(text | self.bias.keys()) for text in texts]
        width = max((len(ids) for ids in self._ids), default=0)
        shape = (len(texts), (width // GROWTH + 1) * GROWTH)
        self._token_ids = torch.full(shape, FREE, dtype=torch.int64)
        self._token_bias = torch.zeros(shape, dtype=torch.float32)
        self._token_counts = torch.full(shape, NOT_IN_TEXT, dtype=torch.int32)
        for b, (ids, text) in enumerate(zip(self._ids, texts, strict=True)):
            places = [0 if token in text else NOT_IN_TEXT for token in ids]
            self._token_ids[b, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            self._token_bias[b, : len(ids)] = torch.tensor([self._bias_of(t) for t in ids])
            self._token_counts[b, : len(ids)] = torch.tensor(places, dtype=torch.int32)

    def push(self, b: int, tokens: Iterable[int]) -> None:
        """Counts tokens that row b has generated."""
        for token in tokens if self.counts else ():
            at = bisect_left(self._ids[b], token)
            if at == len(self._ids[b]) or self._ids[b][at] != token:
                self._insert(b, at, token)
            counts = self._token_counts
            counts[b, at] = max(int(counts[b, at]), 0) + 1

    def onto(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with the lists as they are now."""
        return sampling._replace(
            token_ids=self._token_ids.to(self.device),
            token_bias=self._token_bias.to(self.device) if self.bias else None,
            token_counts=self._token_counts.to(self.device) if self.counts else None,
        )

    def _insert(self, b: int, at: int, token: int) -> None:
        end = len(self._ids[b])
        if end == self._token_ids.shape[1]:
            self._grow()
        self._ids[b].insert(at, token)
        for field, value in (
            (self._token_ids, token),
            (self._token_bias, self._bias_of(token)),
            (self._token_counts, NOT_IN_TEXT),
        ):
            row = field[b]
            if at < end:
                row[at + 1 : end + 1] = row[at:end].clone()
            row[at] = value

    def _grow(self) -> None:
        def longer(field: Tensor, fill: int) -> Tensor:
            grown = field.new_full((field.shape[0], 2 * field.shape[1]), fill)
            grown[:, : field.shape[1]] = field
            return grown

        self._token_ids = longer(self._token_ids, FREE)
        self._token_bias = longer(self._token_bias, 0)
        self._token_counts = longer(self._token_counts, NOT_IN_TEXT)

    def _bias_of(self, token: int) -> float:
        return self.bias.get(token, 0.0)
