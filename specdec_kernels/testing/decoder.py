"""Speculative decoding of the toy model for several steps, vectorised over rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_kernels.ops import _random
from specdec_kernels.ops.rejection_sample import block_position
from specdec_kernels.testing.toy import Filters, ToyModel, processed
from specdec_kernels.tree import Acceptance, SamplingParams


class Verify(Protocol):
    """The sampler under test: a verify window and its raw target logits to what is accepted."""

    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        parents: Tensor,
        num_nodes: Tensor,
        sampling: SamplingParams,
        /,
        *,
        draft_logits: Tensor | None = None,
    ) -> Acceptance: ...


# (draft logits [N, Vd], sampling, depth below the root, count) -> distinct ids [N, count], drawn
# from softmax(logits) without replacement, in draw order, -1 where nothing is left to draw.
Draw = Callable[[Tensor, SamplingParams, int, int], Tensor]


class InvalidAcceptance(ValueError):
    """An Acceptance that contradicts its window."""


def gumbel_draws(
    logits: Tensor,
    sampling: SamplingParams,
    depth: int,
    count: int,
    *,
    rule: str | None = None,
    stream: int = _random.DRAFT,
) -> Tensor:
    """The `count` largest of logits and noise: for one, what `sample(stream="draft")` draws."""
    counter = sampling.position + depth
    if rule == "block":
        counter = block_position(sampling.step, depth)
    noise = _random.uniforms(sampling.seed, counter, stream, logits.shape[-1])
    best = (logits + _random.to_gumbel(noise).to(logits.dtype)).topk(count)
    return torch.where(best.values == -math.inf, -1, best.indices)


def draws_for(rule: str | None) -> Draw:
    return partial(gumbel_draws, rule=rule)


class Drafts(NamedTuple):
    """What every step drafts: a tree, the same in all rows, from a draft model.

    parents: of each slot, the root's first. sampled: siblings are drawn without replacement;
    otherwise they are the draft model's best. filters: those of the draft's own sampling.
    """

    parents: tuple[int, ...]
    sampled: bool = True
    filters: Filters = Filters()

    @property
    def children(self) -> list[list[int]]:
        slots = range(len(self.parents))
        return [[c for c in slots if self.parents[c] == slot] for slot in slots]

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def ancestors(self, slot: int) -> list[int]:
        """The drafted slots on the way from the root to the slot, itself included."""
        parent = self.parents[slot]
        return [] if parent < 0 else [*self.ancestors(parent), slot]

    @staticmethod
    def chain(length: int, *, sampled: bool = True, filters: Filters | None = None) -> Drafts:
        return Drafts(tuple(range(-1, length)), sampled, filters or Filters())


class Text(NamedTuple):
    """Rows in the middle of decoding, N of them.

    prompt: [N, 2]. generated: [N, G], -1 padded, `length` [N] of them decided. seed, step: [N].
    """

    prompt: Tensor
    generated: Tensor
    length: Tensor
    seed: Tensor
    step: Tensor

    @staticmethod
    def begin(prompt: Tensor, seed: Tensor, room: int) -> Text:
        zeros = torch.zeros_like(seed)
        return Text(prompt, seed.new_full((len(seed), room), -1), zeros, seed, zeros.clone())

    def at(self, rows: Tensor) -> Text:
        return Text._make(field[rows] for field in self)

    def sampling(self, filters: Filters, vocab: int) -> SamplingParams:
        return filters.sampling(
            self.prompt,
            self.generated,
            vocab,
            seed=self.seed,
            position=self.length + 2,
            step=self.step,
        )

    def last_two(self) -> tuple[Tensor, Tensor]:
        text = torch.cat([self.prompt, self.generated], 1)
        at = self.length.unsqueeze(1) + torch.arange(2, device=text.device)
        before, last = text.gather(1, at).unbind(1)
        return before, last

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """In place: tokens [len(rows), T], -1 padded, behind some rows; their step has passed."""
        for i in range(tokens.shape[1]):
            emits = tokens[:, i] >= 0
            self.generated[rows[emits], self.length[rows[emits]] + i] = tokens[emits, i]
        self.length[rows] += (tokens >= 0).sum(-1)
        self.step[rows] += 1


class Window(NamedTuple):
    """A verify window, and the token before each slot's own (the toy models read two)."""

    before: Tensor
    draft_token_ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    draft_logits: Tensor | None


def best_draws(logits: Tensor, sampling: SamplingParams, depth: int, count: int) -> Tensor:
    """For deterministic drafts: the draft model's best."""
    return logits.topk(count).indices


def propose(drafts: Drafts, model: ToyModel, text: Text, draw: Draw) -> Window:
    """One window per row. Draft logits of slots without children are NaN: nobody may read them."""
    before, last = text.last_two()
    width, vocab = len(drafts.parents), model.table.shape[-1]
    sampling = text.sampling(drafts.filters, vocab)
    draw = draw if drafts.sampled else best_draws
    ids, befores = last.unsqueeze(1).repeat(1, width), before.unsqueeze(1).repeat(1, width)
    draft_logits = model.table.new_full((len(last), width, vocab), math.nan)
    for slot, kids in enumerate(drafts.children):
        if not kids:
            continue
        logits = model.logits(befores[:, slot], ids[:, slot])
        if drafts.filters != Filters():
            logits = processed(logits, sampling, ids[:, drafts.ancestors(slot)])
        draft_logits[:, slot] = logits
        ids[:, kids] = draw(logits, sampling, drafts.depths[slot], len(kids))
        befores[:, kids] = ids[:, slot : slot + 1]
    parents = torch.tensor(drafts.parents, dtype=torch.int32, device=ids.device)
    return Window(
        befores,
        ids,
        parents.repeat(len(last), 1),
        torch.full_like(parents[:1], width).repeat(len(last)),
        draft_logits if drafts.sampled else None,
    )


def check_acceptance(result: Acceptance, window: Window, vocab: int) -> None:
    """Raises InvalidAcceptance unless path, count and tokens of unfinished rows agree."""

    def check(good: Tensor, what: str) -> None:
        if not bool(good.all()):
            row = int((~good).nonzero()[0, 0])
            found = ", ".join(f"{k} {v[row].tolist()}" for k, v in result._asdict().items())
            drafted = window.draft_token_ids[row].tolist()
            raise InvalidAcceptance(f"expected {what}; got {found} for drafts {drafted}")

    ids, out, path = window.draft_token_ids, result.output_token_ids, result.path.long()
    count = result.num_accepted.long().unsqueeze(1)
    at = torch.arange(ids.shape[1], device=ids.device)
    check((count >= 0) & (count < ids.shape[1]), "num_accepted between 0 and T - 1")
    check((out >= 0) == (at <= count), "num_accepted + 1 output tokens, then -1")
    check(out < vocab, "tokens of the vocabulary")
    check((path >= 0) == (at <= count), "num_accepted + 1 slots in path, then -1")
    check(path[:, :1] == 0, "a path from the root")
    behind = path[:, 1:].clamp(min=0)
    kept = at[1:] <= count
    check((window.parents.gather(1, behind) == path[:, :-1]) | ~kept, "a path along parents")
    check((ids.gather(1, behind) == out[:, :-1]) | ~kept, "the accepted drafts' tokens as output")


class Decoder(NamedTuple):
    """What is decoded, and how it is drafted; row i starts from prompt i modulo their number."""

    target: ToyModel
    draft: ToyModel
    drafts: Drafts
    filters: Filters
    draw: Draw
    prompts: tuple[tuple[int, int], ...] = ((0, 1), (2, 0), (1, 1))

    def start(self, seeds: Tensor, room: int) -> Text:
        prompts = seeds.new_tensor(self.prompts)
        return Text.begin(prompts[seeds % len(prompts)], seeds, room)

    def step(self, verify: Verify, text: Text) -> tuple[Window, Acceptance]:
        """One verification of every row."""
        window = propose(self.drafts, self.draft, text, self.draw)
        result = verify(
            self.target.logits(window.before, window.draft_token_ids),
            *window[1:4],
            text.sampling(self.filters, self.target.vocab),
            draft_logits=window.draft_logits,
        )
        check_acceptance(result, window, self.target.vocab)
        return window, result

    def run(self, verify: Verify, seeds: Tensor, num_tokens: int) -> Text:
        """Decodes until every row has `num_tokens`; rows that have them leave the batch."""
        text = self.start(seeds, num_tokens + len(self.drafts.parents))
        while len(rows := (text.length < num_tokens).nonzero()[:, 0]):
            _, result = self.step(verify, text.at(rows))
            text.append(rows, result.output_token_ids)
        return text
