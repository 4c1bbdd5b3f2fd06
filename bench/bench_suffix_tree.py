"""The suffix tree with 100,000 tokens of finished texts in it, 24 tokens deep.

extend: one more text of 1000 tokens, so that milliseconds are microseconds per token. turnover:
the oldest text leaves as well. draft: 32 drafts of at most 24 tokens, for contexts from the texts.
step: what the drafter does per step, 4 new tokens in the row's own tree and in the cache, then a
draft; one step finds cold caches, as it does behind a forward pass, and the first of 32 in a row
warms them for the others.

The rival is arctic-inference, or where it is not installed a dictionary in Python, which drafts a
chain behind the longest match. `bytes_per_token` is what the trees hold per cached token (that of
arctic by its own estimate, with 24 bytes for each of the texts' tokens).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.bench_ngram_index import copied, free
from bench.harness import Case, Options
from bench.suffix_rivals import (
    DEPTH,
    MIN_PROB,
    MOST,
    Arctic,
    ArcticRequests,
    Draft,
    PythonDict,
    expect_true,
    has_arctic,
)
from specdec_kernels import native

TEXT, CACHED = 1000, 100_000
STEP, ROOM = 4, 40_000  # new tokens per step; those that a row emits before it starts again
CONTEXTS = 32

Text = Callable[[random.Random, int], list[int]]


def words(rng: random.Random, count: int) -> list[int]:
    """Zipf's law, the usual one of words."""
    return rng.choices(range(20_000), [1 / (i + 3) for i in range(20_000)], k=count)


TEXTS: dict[str, Text] = {
    "words": words,
    "copied passages": copied,
    "a document twice": lambda rng, count: free(rng, CACHED // 2) * (2 * count // CACHED + 1),
    "random": free,
    "two tokens at random": lambda rng, count: free(rng, count, 2),
}


@dataclass
class Inputs:
    """Finished texts, further ones, and what each contender made of them."""

    texts: list[Tensor]
    more: list[Tensor]
    row: Tensor
    contexts: list[Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, room: int) -> int:
        """Which call of a contender this is; every `room` calls its state is made anew."""
        call = self.calls.get(name, 0)
        if call >= room:
            self.state.pop(name)
            call = 0
        self.calls[name] = call + 1
        return call


def make(seed: int, *, text: Text) -> Inputs:
    count = 2 * CACHED + ROOM + TEXT
    tokens = torch.tensor(text(random.Random(seed), count)[:count], dtype=torch.int32)
    pieces = list(tokens[: 2 * CACHED].split(TEXT))
    half = CACHED // TEXT
    contexts = [piece[:DEPTH].clone() for piece in tokens[:CACHED].chunk(CONTEXTS)]
    return Inputs(pieces[:half], pieces[half:], tokens[2 * CACHED :], contexts)


def ours(x: Inputs) -> Any:
    if "ours" not in x.state:
        x.state["ours"] = native.cpu.SuffixTree(DEPTH)
        for text in x.texts:
            add(x.state["ours"], text)
    return x.state["ours"]


def add(tree: Any, text: Tensor) -> None:
    number = tree.open()
    tree.extend(number, text)
    tree.close(number)


def arctic(x: Inputs) -> Arctic:
    if "arctic" not in x.state:
        x.state["arctic"] = Arctic()
        for text in x.texts:
            x.state["arctic"].add(text.numpy())
    return x.state["arctic"]


def dictionary(x: Inputs) -> PythonDict:
    if "dict" not in x.state:
        x.state["dict"] = PythonDict()
        for text in x.texts:
            x.state["dict"].add(text.tolist())
            x.state["dict"].end()
    return x.state["dict"]


def extend_ours(x: Inputs, turnover: bool) -> list[Draft]:
    text = x.more[x.count("ours", len(x.more))]
    tree = ours(x)
    add(tree, text)
    if turnover:
        tree.remove_oldest()
    return [Draft(*tree.draft(text[: TEXT // 2], max_tokens=4))]


def extend_arctic(x: Inputs, turnover: bool) -> list[Draft]:
    text = x.more[x.count("arctic", len(x.more))]
    tree = arctic(x)
    tree.add(text.numpy())
    if turnover:
        tree.remove_oldest()
    return [tree.draft(text[TEXT // 2 - DEPTH : TEXT // 2].numpy(), False)]


def extend_dictionary(x: Inputs, turnover: bool) -> list[Draft]:
    call = x.count("dict", len(x.more))
    counts = dictionary(x)
    counts.add(x.more[call].tolist())
    counts.end()
    if turnover:
        counts.forget(1 + call * (TEXT + 1), TEXT)
    return [counts.draft(x.more[call][: TEXT // 2].tolist())]


def extend_reference(x: Inputs, turnover: bool) -> Any:
    counts = PythonDict()
    for text in [*x.texts[turnover:], x.more[0]]:
        counts.add(text.tolist())
        counts.end()
    return counts, [x.more[0][: TEXT // 2]]


def draft_ours(x: Inputs, tree: bool) -> list[Draft]:
    cached = ours(x)
    return [
        Draft(*cached.draft(c, max_tokens=MOST, min_prob=MIN_PROB, tree=tree)) for c in x.contexts
    ]


def draft_arctic(x: Inputs, tree: bool) -> list[Draft]:
    cached = arctic(x)
    return [cached.draft(c.numpy(), tree) for c in x.contexts]


def draft_dictionary(x: Inputs) -> list[Draft]:
    return [dictionary(x).draft(c.tolist()) for c in x.contexts]


def check_drafts(drafts: list[Draft], expected: Any) -> None:
    counts, contexts = expected
    for draft, context in zip(drafts, contexts, strict=True):
        expect_true(draft, counts, context.tolist())


@dataclass
class Row:
    """A row under way beside a cache; `batch` drafts for it."""

    batch: Any
    tokens: Tensor
    length: int = TEXT

    def step(self, tree: bool) -> Draft:
        self.length += STEP
        self.batch.follow(self.tokens, torch.tensor([self.length], dtype=torch.int32))
        return Draft(*self.batch.draft(max_tokens=MOST, min_prob=MIN_PROB, tree=tree)[0])


def new_row(x: Inputs, length: int = TEXT) -> Row:
    cache = native.cpu.SuffixCache(max_depth=DEPTH, max_requests=10_000, max_tokens=10 * CACHED)
    parts = [text.numpy().tobytes() for text in x.texts]
    cache.load(b"".join(parts), torch.full((len(parts),), TEXT).numpy().tobytes())
    batch = native.cpu.SuffixBatch(1, max_depth=DEPTH, cache=cache)
    batch.follow(x.row[None], torch.tensor([TEXT + 1], dtype=torch.int32))
    return Row(batch, x.row[None], length)


def step_ours(x: Inputs, steps: int, tree: bool) -> Draft:
    x.count("row", ROOM // STEP // steps)
    if "row" not in x.state:
        x.state["row"] = new_row(x)
    for _ in range(steps):
        draft = x.state["row"].step(tree)
    return draft


def step_reference(x: Inputs, steps: int, tree: bool) -> Draft:
    """All tokens at once."""
    return new_row(x, TEXT + STEP * (steps - 1)).step(tree)


def step_arctic(x: Inputs, steps: int, tree: bool) -> Draft:
    call = x.count("requests", ROOM // STEP // steps)
    if "requests" not in x.state:
        x.state["requests"] = ArcticRequests(x.texts, x.row[:TEXT])
    row = x.row.numpy()
    for i in range(steps):
        end = TEXT + STEP * (call * steps + i + 1)
        draft = x.state["requests"].step(row[end - STEP : end], row[end - DEPTH : end], tree)
    return draft


def step_dictionary(x: Inputs, steps: int) -> Draft:
    call = x.count("dict", ROOM // STEP // steps)
    counts = dictionary(x)
    for i in range(steps):
        end = TEXT + STEP * (call * steps + i + 1)
        counts.add(x.row[end - STEP : end].tolist())
        x.state["context"] = x.row[end - DEPTH : end].tolist()
        draft = counts.draft(x.state["context"])
    return draft


def check_step(draft: Draft, expected: Draft) -> None:
    assert draft == expected, (draft, expected)


def check_rival_step(draft: Draft, expected: Draft, x: Inputs) -> None:
    """A row's own end is an occurrence to arctic; the dictionary drafts behind one match alone."""
    if has_arctic():
        assert bool(draft.tokens) >= bool(expected.tokens)
    else:
        expect_true(draft, dictionary(x), x.state["context"])


def held(x: Inputs) -> dict[str, float]:
    found = {"bytes_per_token": round(ours(x).bytes / CACHED, 1)}
    if has_arctic():
        found["arctic_bytes_per_token"] = round(arctic(x).tree.estimate_memory() / CACHED, 1)
    return found


def cases(options: Options) -> Iterable[Case]:
    for name, text in list(TEXTS.items())[: 2 if options.quick else None]:
        make_inputs = partial(make, text=text)
        common: dict[str, Any] = dict(make=make_inputs, bytes=CACHED * 4)
        shape = {"cached": CACHED, "dtype": "int32", "text": name, **held(make_inputs(0))}
        for turnover in (False, True):
            rival = extend_arctic if has_arctic() else extend_dictionary
            yield Case(
                shape={"what": "turnover" if turnover else "extend", **shape},
                run=partial(extend_ours, turnover=turnover),
                reference=partial(extend_reference, turnover=turnover),
                rivals={rival_name(): partial(rival, turnover=turnover)},
                check=check_drafts,
                **common,
            )
        for tree in (False, True):
            yield Case(
                shape={"what": "draft", "tree": tree, **shape},
                run=partial(draft_ours, tree=tree),
                reference=lambda x: (dictionary(x), x.contexts),
                rivals={
                    rival_name(): partial(draft_arctic, tree=tree)
                    if has_arctic()
                    else draft_dictionary
                },
                check=check_drafts,
                **common,
            )
        for steps in (1, 32):
            yield Case(
                shape={"what": "step", "steps": steps, **shape},
                run=partial(step_ours, steps=steps, tree=True),
                reference=partial(step_reference, steps=steps, tree=True),
                rivals={
                    rival_name(): partial(step_arctic, steps=steps, tree=True)
                    if has_arctic()
                    else partial(step_dictionary, steps=steps)
                },
                check=check_step,
                check_rival=check_rival_step,
                **common,
            )


def rival_name() -> str:
    return "arctic_inference" if has_arctic() else "python_dict"
