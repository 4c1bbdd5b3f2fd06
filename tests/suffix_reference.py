"""What a suffix tree must answer, from a dictionary of all n-grams: the specification in Python."""

import heapq
from collections import Counter

END = -1


class AllNgrams:
    """Counts every n-gram of up to `max_depth` tokens of the suffixes that are in the tree.

    eager: a suffix enters when it occurs nowhere else yet, or has max_depth tokens; else it enters
    when max_depth tokens follow its beginning. Either way all do when their text is closed.
    """

    def __init__(self, max_depth, eager=False):
        self.max_depth, self.eager = max_depth, eager
        self.texts, self.entered = [], []  # all of them, and how many suffixes of each entered
        self.first = 0  # texts before this one were removed

    def open(self):
        self.texts.append([])
        self.entered.append(0)
        return len(self.texts) - 1

    def extend(self, text, tokens):
        for token in tokens:
            self.texts[text].append(token)
            self._enter(text)

    def close(self, text):
        if self.texts[text][-1:] != [END]:
            self.texts[text].append(END)
            self.entered[text] = len(self.texts[text]) - 1

    def remove_oldest(self):
        self.first += 1

    def _enter(self, text):
        tokens = self.texts[text]
        while self.entered[text] < len(tokens):
            rest = tokens[self.entered[text] :]
            repeats = bool(self.counts()[tuple(rest)]) if self.eager else True
            if repeats and len(rest) < self.max_depth:
                return
            self.entered[text] += 1

    def counts(self):
        counts = Counter()
        for tokens, entered in list(zip(self.texts, self.entered, strict=True))[self.first :]:
            for i in range(entered):
                suffix = tokens[i : i + self.max_depth]
                counts.update(tuple(suffix[:n]) for n in range(1, len(suffix) + 1))
        return counts

    def following(self, counts, ngram):
        """{token: count} behind a path that `reduced` left as it is."""
        if len(ngram) < self.max_depth:
            return continuations(counts, ngram)
        for tokens, entered in list(zip(self.texts, self.entered, strict=True))[self.first :]:
            for i in range(entered):
                end = i + len(ngram)
                if tuple(tokens[i:end]) == ngram and end < len(tokens):
                    return {tokens[end]: 1}
        return {}

    def reduced(self, counts, ngram):
        """What decides on the next token.

        A path within the tree or whose beginning occurred once, else its latter half.
        """
        if len(ngram) < self.max_depth or counts[ngram[: self.max_depth]] == 1:
            return ngram
        return ngram[-(self.max_depth // 2) :]


def continuations(counts, ngram):
    """{token: count}, the end of a text included."""
    n = len(ngram)
    return {k[-1]: c for k, c in counts.items() if len(k) == n + 1 and k[:n] == tuple(ngram)}


def longest_match(counts, context, max_depth):
    for n in range(min(len(context), max_depth - 1), 0, -1):
        if set(continuations(counts, context[-n:])) - {END}:
            return n
    return 0


def scores(spec, counts, context, *, max_tokens, factor, offset, min_prob, stop):
    """The score of the tree behind each match length, by length."""
    found = {}
    for n in range(1, longest_match(counts, context, spec.max_depth) + 1):
        limit = max(min(max_tokens, int(n * factor + offset + 1e-6)), 0)
        found[n] = grow(spec, counts, tuple(context[-n:]), limit, min_prob, stop)
    return found


def grow(spec, counts, context, limit, min_prob, stop):
    score, drafted = 0.0, 0
    heap = [(-1.0, context)]
    first = True
    while heap and drafted < limit:
        prob, ngram = heapq.heappop(heap)
        if not first:
            drafted += 1
            score -= prob
        if first or ngram[-1] not in stop:
            ngram = spec.reduced(counts, ngram)
            following = spec.following(counts, ngram)
            total = sum(following.values())
            for token, count in following.items():
                if token != END and -prob * count / total >= min_prob - 1e-12:
                    heapq.heappush(heap, (prob * count / total, (*ngram, token)))
        first = False
    return score
