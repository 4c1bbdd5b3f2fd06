"""Plain data that travels through the loop: DraftTree, Acceptance, SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT_PARENT = -1
PADDING_PARENT = -2


class LogitEdits(NamedTuple):
    """The optional fields of SamplingParams."""

    token_ids: Tensor | None = None
    token_bias: Tensor | None = None
    token_counts: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    allowed_tokens: Tensor | None = None

    def __bool__(self) -> bool:
        return any(field is not None for field in self)


class SamplingParams(NamedTuple):
    """How each row of the batch is sampled. Every field is a tensor [B] unless said otherwise.

    temperature (fp32): 0 is greedy. top_k (int32): <= 0 keeps all. top_p (fp32): >= 1 keeps all.
    min_p (fp32): <= 0 keeps all. seed, position, step (int64): the counters of the random numbers;
    `position` is that of the token being decided at the root, `step` counts verifications and
    replaces it under rule `block`.

    The optional fields change logits before the temperature, in this order: bias, penalties, mask.
    In a window each node counts its own drafted ancestors, itself included, as generated text.

    token_ids: tokens of the row that the next two fields speak of, int64 [B, H]; ids outside the
        vocabulary (-1) are padding. Ascending and distinct is quickest; repeated ids add up.
    token_bias: added to the token's logit, fp32 [B, H]; -infinity suppresses the token.
    token_counts: how often the token was generated, int32 [B, H]: 0 is a token of the prompt alone,
        -1 one that is not in the text.
    repetition_penalty (fp32): divides the positive and multiplies the negative logits of all tokens
        of the text (Keskar et al., "CTRL", 2019); 1 is none.
    presence_penalty, frequency_penalty (fp32): subtracted from the logits of generated tokens, once
        and once per occurrence; 0 is none.
    allowed_tokens: int32 [B, T, ceil(V / 32)] (for `sample` [N, ceil(V / 32)]), bit j of word i set
        when token 32 i + j is allowed after the node.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor
    token_ids: Tensor | None = None
    token_bias: Tensor | None = None
    token_counts: Tensor | None = None
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    allowed_tokens: Tensor | None = None

    @property
    def edits(self) -> LogitEdits:
        return LogitEdits(*self[7:])

    def at(self, rows: Any) -> SamplingParams:
        """The parameters of some rows; `rows` indexes the first dimension."""
        return SamplingParams._make(None if field is None else field[rows] for field in self)

    @staticmethod
    def make(
        batch: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | Sequence[int] | Tensor = 0,
        position: int | Sequence[int] | Tensor = 0,
        step: int | Sequence[int] | Tensor = 0,
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """One setting for all rows; seed, position and step may also be given per row."""

        def per_row(value: int | Sequence[int] | Tensor) -> Tensor:
            if isinstance(value, int):
                return torch.full((batch,), value, dtype=torch.int64, device=device)
            return torch.as_tensor(value, dtype=torch.int64, device=device)

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((batch,), value, dtype=dtype, device=device)

        return SamplingParams(
            full(temperature, torch.float32),
            full(top_k, torch.int32),
            full(top_p, torch.float32),
            full(min_p, torch.float32),
            per_row(seed),
            per_row(position),
            per_row(step),
        )


class Acceptance(NamedTuple):
    """What one verification decided.

    path: accepted slots, root first, -1 padded, int32 [B, T].
    num_accepted: drafted tokens kept, the bonus token not counted, int32 [B].
    output_token_ids: accepted tokens, then the recovered or bonus token, -1 padded, int64 [B, T].
    status: 0, or a sum of the STATUS_ bits, int32 [B].
    A finished row (num_nodes 0) has -1 everywhere, num_accepted and status 0 included.
    """

    path: Tensor
    num_accepted: Tensor
    output_token_ids: Tensor
    status: Tensor


class Decision(NamedTuple):
    """What the host knows of a step: an Acceptance, cut where rows finished.

    path: accepted slots, root first, -1 padded, int32 [B, T].
    num_accepted: drafted tokens that matched, per row.
    num_kept: slots to commit per row, as many as tokens were emitted.
    """

    path: Tensor
    num_accepted: list[int]
    num_kept: list[int]


STATUS_NAN = 1  # a logits row that was needed held a NaN
STATUS_EMPTY = 2  # no token had a finite logit


class DraftTree(NamedTuple):
    """The verify window: slot 0 is the last committed token, slots 1.. are drafted.

    draft_token_ids: int64 [B, T]; a padding slot repeats the root's token.
    parents: int32 [B, T], parent slot < child slot; root -1, padding -2.
    num_nodes: int32 [B], the root counted; 0 is a finished row.
    tree_mask: int64 [B or 1, T, ceil(T / 64)] ancestor words, bit j of row i set when slot j is i
        or an ancestor of i; None is a causal chain.
    depth: int32 [B, T], root and padding 0; None with a causal chain.
    draft_logits: [B, T, Vd], the logits whose softmax, with nothing further applied, slot i's
        children were drawn from: without replacement, in slot order, none kept or dropped because
        of its own value. None when the draft is deterministic.
    draft_vocab_map: target id of each draft id, int64 [Vd]; None means equal ids.
    chances: what the drafter holds for the probability that each node is accepted, fp32 [B, T],
        never above that of the parent; None when it cannot tell. No verification reads it.
    """

    draft_token_ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    tree_mask: Tensor | None = None
    depth: Tensor | None = None
    draft_logits: Tensor | None = None
    draft_vocab_map: Tensor | None = None
    chances: Tensor | None = None

    @property
    def width(self) -> int:
        """Slots per row, T."""
        return self.draft_token_ids.shape[1]

    def drafted_depth(self) -> list[int]:
        """Levels below each row's root: the most tokens that verification could accept."""
        if self.depth is None:
            return [max(n - 1, 0) for n in self.num_nodes.tolist()]
        return self.depth.amax(1).tolist()

    @staticmethod
    def from_lists(
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]] | None = None,
        *,
        width: int | None = None,
        device: torch.device | str = "cpu",
    ) -> DraftTree:
        """Builds the padded tensors from one list per row of tokens, of parents and of chances.

        An empty row is a finished one. `width` fixes T (default: the longest row, at least 1).
        """
        batch = len(tokens)
        size = max([len(row) for row in tokens] + [1]) if width is None else width
        ids = [[*row, *([row[0] if row else 0] * (size - len(row)))] for row in tokens]
        links = [[*row, *([PADDING_PARENT] * (size - len(row)))] for row in parents]
        num_nodes = torch.tensor([len(row) for row in tokens], dtype=torch.int32, device=device)
        draft_token_ids = torch.tensor(ids, dtype=torch.int64, device=device).view(batch, size)
        parent_ids = torch.tensor(links, dtype=torch.int32, device=device).view(batch, size)
        tree = DraftTree(draft_token_ids, parent_ids, num_nodes)
        if chances is not None:
            padded = [[*row, *([0.0] * (size - len(row)))] for row in chances]
            tree = tree._replace(
                chances=torch.tensor(padded, dtype=torch.float32, device=device).view(batch, size)
            )
        if all(row == list(range(-1, len(row) - 1)) for row in parents) and batch == 1:
            return tree
        words, depth = masks_from_parents(parents, size)
        return tree._replace(
            tree_mask=torch.tensor(words, dtype=torch.int64, device=device).view(batch, size, -1),
            depth=torch.tensor(depth, dtype=torch.int32, device=device).view(batch, size),
        )


def roots_of(tokens: Tensor, lens: Tensor) -> Tensor:
    """The last token of each row of int32 [B, S] with `lens` tokens: int64 [B]."""
    return tokens.gather(1, (lens.long() - 1)[:, None]).flatten().long()


def masks_from_parents(
    parents: Sequence[Sequence[int]], size: int
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Ancestor words (signed 64-bit) and depths of every slot, padding included."""
    num_words = (size + 63) // 64
    all_words: list[list[list[int]]] = []
    all_depths: list[list[int]] = []
    for row in parents:
        bits: list[int] = []
        depth: list[int] = []
        for slot in range(size):
            parent = row[slot] if slot < len(row) else PADDING_PARENT
            if parent >= slot:
                raise ValueError(f"DraftTree: expected parent < slot, got {parent} for {slot}")
            bits.append((1 << slot) | (bits[parent] if parent >= 0 else 0))
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        all_words.append([[_signed_word(b, w) for w in range(num_words)] for b in bits])
        all_depths.append(depth)
    return all_words, all_depths


def _signed_word(bits: int, index: int) -> int:
    word = (bits >> (64 * index)) & 0xFFFF_FFFF_FFFF_FFFF
    return word - (1 << 64) if word >> 63 else word
