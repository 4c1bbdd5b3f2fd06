"""What the tokens of a tokenizer stand for, byte for byte."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]


class Vocabulary:
    """The tokens of one tokenizer as bytes.

    pieces: what each id adds to a text; special tokens their names, those that only mark the
        beginning and ids without a token b"".
    specials: ids that are no text, and are never taken for tokens that spell the same.
    spares: ids that stand back where another one has the same bytes (byte tokens of SentencePiece).
    encode: the ids of a text, without special tokens around it, and the characters [start, end)
        that each stands for.
    adds_space: whether it puts a space in front of a text.
    start: ids that a text begins with.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        encode: Encode,
        *,
        specials: Collection[int] = (),
        spares: Collection[int] = (),
        adds_space: bool = False,
        start: Sequence[int] = (),
    ):
        self.pieces, self.encode, self.start = pieces, encode, tuple(start)
        self.adds_space = adds_space
        self.specials = frozenset(specials)
        self.ids: dict[bytes, int] = {}
        ranked = sorted(range(len(pieces)), key=lambda i: i in spares) if spares else None
        for i in ranked or range(len(pieces)):
            if pieces[i] and i not in self.specials:
                self.ids.setdefault(pieces[i], i)
        self.longest = max(map(len, self.ids), default=0)
        self._sorted = sorted(self.ids)
        self._sorted_ids = torch.tensor([self.ids[piece] for piece in self._sorted])

    def spell(self, data: bytes) -> list[int]:
        """Tokens of exactly these bytes, the longest first; bytes that no token has are left out.

        Unlike `encode` it takes what is no whole character, and adds no space in front.
        """
        found, at = [], 0
        while at < len(data):
            sizes = range(min(self.longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self.ids), 0)
            if size:
                found.append(self.ids[data[at : at + size]])
            at += max(size, 1)
        return found

    def beginning_with(self, prefix: bytes) -> Tensor:
        """Ids of the tokens that begin with these bytes, int64 [n], on the CPU."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_left(self._sorted, prefix + b"\xff" * (self.longest + 1))
        return self._sorted_ids[first:last]

    def within(self, data: bytes) -> list[int]:
        """Ids of the tokens that `data` begins with."""
        ends = range(1, min(len(data), self.longest) + 1)
        return [self.ids[data[:end]] for end in ends if data[:end] in self.ids]


def pairs_of(
    target: Vocabulary, draft: Vocabulary, specials: Mapping[int, int], sizes: tuple[int, int]
) -> dict[int, int]:
    """Target ids and the draft ids of the same bytes; `specials` are added to those of text.

    sizes: ids from there on are left out, the target's and the draft's.
    """
    same = {i: draft.ids[piece] for piece, i in target.ids.items() if piece in draft.ids}
    pairs = (same | dict(specials)).items()
    return {t: d for t, d in pairs if t < sizes[0] and d < sizes[1]}
