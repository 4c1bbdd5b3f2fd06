"""What each row of the batch has emitted so far, and when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

GROWTH = 1024


class Rows:
    """Token buffers and stop conditions of a batch.

    prompts: one token list per row, without padding.
    max_new_tokens: at most this many per row.
    eos_token_ids: emitting one of these finishes the row.
    should_stop: further stop condition, asked after every token with the row and its new tokens.
    on_token: told of every emitted token: row, token, whether it was an accepted draft token.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        should_stop: Callable[[int, list[int]], bool] | None = None,
        on_token: Callable[[int, int, bool], None] | None = None,
    ):
        self.prompt_lens = [len(p) for p in prompts]
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.should_stop = should_stop
        self.on_token = on_token
        self.new: list[list[int]] = [[] for _ in prompts]
        self.done = [False] * len(prompts)
        self._synced = list(self.prompt_lens)  # what `lens` holds, known without asking a device
        width = max(self.prompt_lens) + min(max_new_tokens, GROWTH)
        self.tokens = torch.zeros(len(prompts), width, dtype=torch.int32, device=device)
        for b, prompt in enumerate(prompts):
            self.tokens[b, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.lens = torch.tensor(self.prompt_lens, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.new)

    def length(self, b: int) -> int:
        return self.prompt_lens[b] + len(self.new[b])

    def left(self, b: int) -> int:
        """How many more tokens row b may emit."""
        return 0 if self.done[b] else self.max_new_tokens - len(self.new[b])

    def push(self, b: int, token: int, drafted: bool = False) -> bool:
        """Appends a token to an unfinished row; True when that finished the row."""
        new = self.new[b]
        new.append(token)
        if self.on_token is not None:
            self.on_token(b, token, drafted)
        self.done[b] = (
            token in self.eos_token_ids
            or len(new) >= self.max_new_tokens
            or (self.should_stop is not None and self.should_stop(b, new))
        )
        return self.done[b]

    def sync(self) -> None:
        """Brings the device buffers up to date with what was pushed since the last call."""
        longest = max(self.length(b) for b in range(len(self)))
        if longest > self.tokens.shape[1]:
            grown = self.tokens.new_zeros(len(self), 2 * longest)
            grown[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = grown
        for b, old in enumerate(self._synced):
            fresh = self.new[b][old - self.prompt_lens[b] :]
            if fresh:
                self.tokens[b, old : old + len(fresh)] = torch.tensor(fresh, dtype=torch.int32)
                self._synced[b] = old + len(fresh)
                self.lens[b] = self._synced[b]
