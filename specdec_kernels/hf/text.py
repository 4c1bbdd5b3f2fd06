"""The ids that plain generate would show its logits processors: left-padded, row by row."""

from __future__ import annotations

from torch import Tensor

from specdec_kernels.decoding.rows import Rows

GROWTH = 1024


class PaddedText:
    """Prompts with their padding, and what the rows have emitted behind them.

    prompts: int64 [B, W], left-padded.
    """

    def __init__(self, prompts: Tensor, rows: Rows):
        self.rows = rows
        self.width = prompts.shape[1]
        self.prompts: list[list[int]] = prompts.tolist()
        self._ids = prompts.new_zeros(len(prompts), self.width + min(rows.max_new_tokens, GROWTH))
        self._ids[:, : self.width] = prompts
        self._copied = [0] * len(prompts)

    def length(self, b: int) -> int:
        """Padding, prompt and new tokens of row b."""
        return self.width + len(self.rows.new[b])

    def ids(self, chosen: list[int]) -> Tensor:
        """The text of some rows of one length L, int64 [n, L]."""
        for b in chosen:
            self._copy(b)
        length = self.length(chosen[0])
        if len(chosen) == len(self._ids):
            return self._ids[:, :length].clone()
        return self._ids[chosen, :length]

    def by_length(self, chosen: list[int]) -> list[list[int]]:
        """Indices into `chosen`, grouped by the rows' present lengths."""
        groups: dict[int, list[int]] = {}
        for i, b in enumerate(chosen):
            groups.setdefault(self.length(b), []).append(i)
        return list(groups.values())

    def _copy(self, b: int) -> None:
        """Takes over what row b emitted since the last call."""
        start, fresh = self.width + self._copied[b], self.rows.new[b][self._copied[b] :]
        if not fresh:
            return
        end = start + len(fresh)
        if end > self._ids.shape[1]:
            grown = self._ids.new_zeros(len(self._ids), 2 * end)
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
        self._ids[b, start:end] = self._ids.new_tensor(fresh)
        self._copied[b] += len(fresh)
