"""Where the n-gram drafter finds its matches: in an index of the texts, or by reading them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import pick
from specdec_kernels.ops.ngram_lookup import ngram_lookup

Found = tuple[list[list[list[int]]], list[int]]


class Search(Protocol):
    """Finds what `ngram_lookup` finds, for rows that grow: int32 [B, S] and their lens [B]."""

    def begin(self, tokens: Tensor, lens: Tensor) -> None:
        """A new batch."""

    def find(self, tokens: Tensor, lens: Tensor) -> Found:
        """Per row its drafts, best first, and how long the longest match is, 0 without one."""


class IndexSearch:
    """Follows the texts in `native.cpu.NgramIndex`: a step costs the same however long they are.

    Between two calls of `begin` rows only grow; one that got shorter, or other last tokens than
    before, is indexed anew.
    """

    def __init__(self, *, lengths: Sequence[int], **options: Any):
        self.options = options
        self.index: Any = None

    def begin(self, tokens: Tensor, lens: Tensor) -> None:
        self.index = native.cpu.NgramIndex(tokens.shape[0], **self.options)
        self._follow(tokens, lens)

    def find(self, tokens: Tensor, lens: Tensor) -> Found:
        if self.index is None or self.index.batch != tokens.shape[0]:
            self.begin(tokens, lens)
        else:
            self._follow(tokens, lens)
        return self.index.lookup()

    def _follow(self, tokens: Tensor, lens: Tensor) -> None:
        if tokens.stride(-1) != 1:
            tokens = tokens.contiguous()
        self.index.follow(tokens, lens.contiguous(), native.num_threads())


class OpSearch:
    """Reads the texts with `ngram_lookup` each time.

    Of the longest match's length it tells which of `lengths` it reaches, by a lookup for each.
    """

    def __init__(self, *, lengths: Sequence[int], **options: Any):
        self.lengths = lengths
        self.options = options

    def begin(self, tokens: Tensor, lens: Tensor) -> None:
        pass

    def find(self, tokens: Tensor, lens: Tensor) -> Found:
        ids, num = ngram_lookup(tokens, lens, **self.options)
        drafts = [
            [draft for draft, n in zip(row, counts, strict=True) if n]
            for row, counts in zip(ids.tolist(), num.tolist(), strict=True)
        ]
        min_n, max_n = self.options["min_n"], self.options["max_n"]
        longest = [min_n if row else 0 for row in drafts]
        for length in self.lengths:
            if length <= min_n:
                continue
            if length > max_n or not any(longest):
                break
            _, num = ngram_lookup(tokens, lens, min_n=length, max_n=length, k=1)
            reached = num.flatten().tolist()
            longest = [length if n else known for n, known in zip(reached, longest, strict=True)]
        return drafts, longest


def _on_cpu(*, max_n: int, **options: Any) -> Search:
    long = max_n > native.cpu.NgramIndex.MAX_N
    return (OpSearch if long else IndexSearch)(max_n=max_n, **options)


_SEARCHES: dict[str, Callable[..., Search]] = {
    "cpu": _on_cpu, "reference": OpSearch, "triton": OpSearch, "cuda": OpSearch
}  # fmt: skip


def make_search(device_type: str, **options: Any) -> Search:
    """The best one for texts on a device, unless a backend of `ngram_lookup` was asked for.

    Options: min_n, max_n, k and num_matches of `ngram_lookup`; lengths, ascending: those between
    which the caller distinguishes.
    """
    return pick("ngram_lookup", _SEARCHES, device_type, None)(**options)
