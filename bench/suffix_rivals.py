"""What the suffix tree is measured against: arctic-inference, or a dictionary in Python."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor

DEPTH, MOST, MIN_PROB = 24, 24, 0.1
LONGEST_KEY = 4
END = -1


class Draft(NamedTuple):
    tokens: list[int]
    parents: list[int]
    probs: list[float]
    score: float
    match_length: int


class PythonDict:
    """Positions behind every n-gram of up to 4 tokens; longer ones are compared."""

    def __init__(self) -> None:
        self.text: list[int] = [END]
        self.places: dict[tuple[int, ...], list[int]] = {}

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            end = len(self.text)
            for key in self._keys(end):
                self.places.setdefault(key, []).append(end)

    def end(self) -> None:
        self.text.append(END)

    def forget(self, start: int, length: int) -> None:
        """The oldest text's tokens, which lie in `text` from `start` on."""
        for end in range(start + 1, start + length + 1):
            for key in self._keys(end):
                self.places[key].pop(0)

    def _keys(self, end: int) -> list[tuple[int, ...]]:
        keys = [tuple(self.text[end - n : end]) for n in range(1, min(LONGEST_KEY, end) + 1)]
        return [key for key in keys if END not in key]

    def continuations(self, ngram: tuple[int, ...]) -> Counter[int]:
        n, text = len(ngram), self.text
        places = self.places.get(ngram[-LONGEST_KEY:], [])
        if n > LONGEST_KEY:
            places = [p for p in places if tuple(text[p - n : p]) == ngram]
        return Counter(text[p] for p in places if p < len(text))

    def reduced(self, ngram: tuple[int, ...]) -> tuple[int, ...]:
        """What decides on the next token: where our tree is cut, the latter half, if it repeats."""
        if len(ngram) < DEPTH or self.continuations(ngram[:DEPTH]).total() == 1:
            return ngram
        return ngram[-(DEPTH // 2) :]

    def draft(self, context: list[int]) -> Draft:
        """A chain behind the longest match."""
        for n in range(min(len(context), DEPTH - 1), 0, -1):
            found = self.continuations(tuple(context[-n:]))
            if set(found) - {END}:
                return self._chain(tuple(context[-n:]))
        return Draft([], [], [], 0.0, 0)

    def _chain(self, ngram: tuple[int, ...]) -> Draft:
        start, prob = ngram, 1.0
        tokens: list[int] = []
        probs: list[float] = []
        while len(tokens) < min(MOST, len(start)):
            ngram = self.reduced(ngram)
            found = self.continuations(ngram)
            token, count = max(found.items(), key=lambda item: (item[0] != END, item[1]))
            prob *= count / found.total()
            if token == END or prob < MIN_PROB:
                break
            tokens.append(token)
            probs.append(prob)
            ngram = (*ngram, token)
        return Draft(tokens, list(range(-1, len(tokens) - 1)), probs, sum(probs), len(start))


def expect_true(draft: Draft, counts: PythonDict, context: list[int]) -> None:
    """Raises AssertionError unless each node's probability is what the counts say."""
    grams: list[tuple[int, ...]] = []
    for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        before = tuple(context[-draft.match_length :]) if parent < 0 else grams[parent]
        before = counts.reduced(before)
        found = counts.continuations(before)
        above = 1.0 if parent < 0 else draft.probs[parent]
        expected = above * found[token] / found.total()
        assert abs(draft.probs[i] - expected) < 1e-5, (token, draft.probs[i], expected)
        grams.append((*before, token))


class Arctic:
    """A tree of arctic-inference, for finished texts."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree

        self.tree = SuffixTree(DEPTH)
        self.next = self.oldest = 0

    def add(self, tokens: Any) -> None:
        self.tree.extend_ndarray(self.next, tokens)
        self.next += 1

    def remove_oldest(self) -> None:
        self.tree.remove(self.oldest)
        self.oldest += 1

    def draft(self, context: Any, tree: bool) -> Draft:
        found = self.tree.speculate_ndarray(context, MOST, 1.0, 0.0, MIN_PROB, tree)
        return Draft(found.token_ids, found.parents, found.probs, found.score, found.match_len)


class ArcticRequests:
    """Its cache, with one request under way."""

    def __init__(self, texts: list[Tensor], prompt: Tensor):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(DEPTH, 10_000)
        for i, text in enumerate(texts):
            self.cache.start_request(i, text[:0].numpy())
            self.cache.add_active_response(i, text.numpy())
            self.cache.stop_request(i)
        self.cache.start_request(-1, prompt.numpy())

    def step(self, new: Any, context: Any, tree: bool) -> Draft:
        self.cache.add_active_response(-1, new)
        found = self.cache.speculate(-1, context, MOST, use_tree_spec=tree)
        return Draft(found.token_ids, found.parents, found.probs, found.score, found.match_len)


def has_arctic() -> bool:
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError:
        return False
    return True
