"""What a suffix tree must answer, from a dictionary of all n-grams: the specification in Python."""

import heapq
from collections import Counter
from typing import NamedTuple

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

    def at_the_end(self, ngram):
        """Whether an eager tree's open text ends here, so that nothing followed yet."""
        text = self.texts[0]
        return self.eager and text[-1:] != [END] and tuple(text[-len(ngram) :]) == ngram


class Path(NamedTuple):
    """A path of a draft: the n-gram that decides what follows, and what was drafted.

    begins: the n-gram begins with the match. again: the place in `drafted` where a draft that
    reached the end of the text reads on.
    """

    ngram: tuple
    drafted: tuple = ()
    begins: bool = True
    period: int = 0

    def following(self, spec, counts):
        """This path as it is continued, and {token: count} behind it."""
        if self.period:
            return self, {self.drafted[-self.period]: 1}
        ngram = spec.reduced(counts, self.ngram)
        path = self._replace(ngram=ngram, begins=self.begins and ngram == self.ngram)
        following = spec.following(counts, ngram)
        if not following and path.begins and path.drafted and spec.at_the_end(ngram):
            path = path._replace(period=len(self.drafted))
            return path, {self.drafted[0]: 1}
        return path, following

    def then(self, token):
        return self._replace(ngram=(*self.ngram, token), drafted=(*self.drafted, token))


def continuations(counts, ngram):
    """{token: count}, the end of a text included."""
    n = len(ngram)
    return {k[-1]: c for k, c in counts.items() if len(k) == n + 1 and k[:n] == tuple(ngram)}


def longest_match(counts, context, max_depth):
    for n in range(min(len(context), max_depth - 1), 0, -1):
        if set(continuations(counts, context[-n:])) - {END}:
            return n
    return 0


def scores(spec, counts, context, *, max_tokens, min_prob, stop, chances=(), **limits):
    """The score of the tree behind each match length, by length."""
    found = {}
    for n in range(1, longest_match(counts, context, spec.max_depth) + 1):
        within = min(max_tokens, allowed(n, **limits))
        most = max_tokens if limits["min_prob_beyond"] <= 1 else within
        probs = grow(spec, counts, tuple(context[-n:]), most, min_prob, stop, chances)
        beyond = [prob for prob in probs[within:] if prob >= limits["min_prob_beyond"] - 1e-12]
        found[n] = sum(probs[:within]) + sum(beyond)
    return found


def allowed(length, *, factor, offset, min_prob_beyond):
    return max(int(length * factor + offset + 1e-6), 0)


def chance(chances, length):
    return chances[min(length, len(chances)) - 1] if chances else 1.0


def grow(spec, counts, match, limit, min_prob, stop, chances):
    """Probabilities of the nodes of a tree, the likeliest first."""
    probs = []
    heap = [(-1.0, -1.0, Path(match))]
    while heap and len(probs) < limit:
        prob, share, path = heapq.heappop(heap)
        if path.drafted:
            probs.append(-prob)
        if not path.drafted or path.drafted[-1] not in stop:
            path, following = path.following(spec, counts)
            total = sum(following.values())
            right = chance(chances, len(match) + len(path.drafted))
            for token, count in following.items():
                if token != END and -share * count / total >= min_prob - 1e-12:
                    below = prob * right * count / total, share * count / total, path.then(token)
                    heapq.heappush(heap, below)
    return probs
