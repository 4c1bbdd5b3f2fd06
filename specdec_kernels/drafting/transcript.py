"""One text in the tokens of two models, followed as it grows."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec_kernels.drafting.vocabulary import Vocabulary

LOOKBEHIND = 10  # tokens that are encoded again with what follows them
FURTHEST = 80  # the most of them, where old and new tokens do not meet


class TextTranslation(NamedTuple):
    """Two vocabularies that have the text in common.

    to_draft, to_target: special tokens, ends of text among them, that have a counterpart.
    sizes: of the target's and the draft model's embeddings.
    """

    target: Vocabulary
    draft: Vocabulary
    to_draft: dict[int, int]
    to_target: dict[int, int]
    sizes: tuple[int, int]

    def as_target(self, before: Sequence[int], text: bytes) -> list[int]:
        """Target tokens of what follows the tokens `before`, without a last broken character.

        As the target's tokenizer writes both together, where that has a boundary between them; else
        the longest tokens that spell it.
        """
        pieces = self.target.pieces
        data = b"".join(pieces[token] for token in before if token < len(pieces)) + text
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        ids, _ = self.target.encode(decoder.decode(data))
        text = text[: max(len(text) - len(decoder.getstate()[0]), 0)]
        first, size = len(ids), 0
        while size < len(text) and first > 0:
            first -= 1
            size += len(pieces[ids[first]])
        found = ids[first:]
        if b"".join(pieces[token] for token in found) != text:
            found = self.target.spell(text)
        return found


class Transcript:
    """The target's tokens of one row as the draft model's own.

    ids: the draft model's tokens of all complete characters, as its tokenizer writes them.
    tail: the target's last tokens.
    """

    def __init__(self, translation: TextTranslation):
        self.translation = translation
        self.ids: list[int] = list(translation.draft.start)
        self.tail: deque[int] = deque(maxlen=LOOKBEHIND)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open()

    @property
    def pending(self) -> bytes:
        """The bytes of a character whose rest is to come."""
        return self._decoder.getstate()[0]

    def add(self, tokens: Iterable[int]) -> int:
        """Target tokens that follow; how many of `ids` are still what they were."""
        pieces, to_draft = self.translation.target.pieces, self.translation.to_draft
        same, text = len(self.ids), ""
        for token in tokens:
            special = to_draft.get(token)
            if special is not None:
                same = min(same, self._write(text + self._decoder.decode(b"", True)))
                self._decoder.reset()
                if self.tail or self.ids != [special]:  # else the text begins with it anyway
                    self.ids.append(special)
                self._open()
                text = ""
            elif token < len(pieces):
                text += self._decoder.decode(self._piece(pieces[token]))
            self.tail.append(token)
        return min(same, self._write(text))

    def _open(self) -> None:
        """Text is encoded from here on, whatever stands before."""
        self._first = len(self.ids)
        self._spans: list[tuple[int, int]] = []  # of the ids from there on, in characters
        self._text, self._base = "", 0  # the end of the text, and where that begins
        self._added_space = self.translation.target.adds_space

    def _piece(self, piece: bytes) -> bytes:
        """Without the space that the target's tokenizer adds in front of a text."""
        if not piece or not self._added_space:
            return piece
        self._added_space = False
        return piece.removeprefix(b" ")

    def _write(self, text: str) -> int:
        """Characters that follow; how many of `ids` are still what they were."""
        if not text:
            return len(self.ids)
        self._text += text
        keep, ids, spans = self._encoded()
        old = self.ids[self._first + keep :]
        same = 0
        while same < min(len(old), len(ids)) and old[same] == ids[same]:
            same += 1
        self.ids[self._first + keep :] = ids
        self._spans[keep:] = spans
        start = self._spans[-2 * FURTHEST :][0][0] if self._spans else 0
        if start > self._base:
            self._text, self._base = self._text[start - self._base :], start
        return self._first + keep + same

    def _encoded(self) -> tuple[int, list[int], list[tuple[int, int]]]:
        """How many of the open text's tokens stand, and those behind them with their spans.

        The new tokens are taken from the first boundary on that they share with the second half of
        the old ones that are encoded again.
        """
        old, size = self._spans, LOOKBEHIND
        while True:
            first = max(len(old) - size, 0)
            while first and not _is_boundary(old, first):
                first -= 1
            start = old[first][0] if first else 0
            ids, spans = self.translation.draft.encode(self._text[start - self._base :])
            spans = [(a + start, b + start) for a, b in spans]
            if not first:
                return 0, ids, spans
            begins = {spans[i][0]: i for i in range(1, len(ids)) if _is_boundary(spans, i)}
            for keep in range(first + size // 2, len(old)):
                at = begins.get(old[keep][0])
                if at is not None and _is_boundary(old, keep):
                    return keep, ids[at:], spans[at:]
            if size >= FURTHEST:
                return first, ids, spans
            size *= 2


def _is_boundary(spans: Sequence[tuple[int, int]], at: int) -> bool:
    """Whether a character begins with a token, rather than lying in it and the one before."""
    return spans[at - 1][1] <= spans[at][0]
