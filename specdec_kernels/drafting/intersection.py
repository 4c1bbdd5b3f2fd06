"""A draft model with another vocabulary drafts the tokens that both have.

The draft model reads a target token that it has too as that token, and any other as the longest of
its own tokens that spell it. Its logits are put on the target's ids, -infinity on those it lacks:
drafts, drawn ones included, are then what those of a draft model with the target's tokenizer are.
Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", 2025 (TLI).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.drafting.draft_model import DraftModel, DraftModelDrafter
from specdec_kernels.drafting.draw import spread
from specdec_kernels.drafting.vocabulary import Vocabulary
from specdec_kernels.tree import DraftTree, SamplingParams, roots_of

GROWTH = 1024


class Intersection:
    """Ids that both models share: the target's, and behind them every draft token once more.

    The latter spell target tokens that the draft model lacks; they are read, and never drafted.

    pairs: target ids and the draft ids that stand for the same.
    known: target ids that the draft model reads as one token without being able to draft them.
    sizes: of the target's and the draft model's embeddings.
    """

    def __init__(
        self,
        target: Vocabulary,
        draft: Vocabulary,
        pairs: Mapping[int, int],
        known: Mapping[int, int],
        sizes: tuple[int, int],
        device: torch.device,
    ):
        self.target, self.draft, self.pairs = target, draft, dict(pairs)
        self.target_size, self.draft_size = sizes
        self.target_ids = torch.tensor(sorted(pairs), dtype=torch.int64, device=device)
        drafts = [pairs[i] for i in sorted(pairs)]
        self.draft_ids = torch.tensor(drafts, dtype=torch.int64, device=device)
        self.own_ids = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.own_ids[self.target_ids] = self.draft_ids
        self.own_ids[self.target_size :] = torch.arange(self.draft_size, device=device)
        self._read: dict[int, tuple[int, ...]] = {
            t: (self.target_size + d,) for t, d in known.items() if d < self.draft_size
        }

    def begin(self, ids: list[int]) -> list[int]:
        """The first shared ids of a text, at least one, with those that the draft model wants."""
        start = self.draft.start or (() if ids else (0,))
        if self.own_ids[ids[: len(start)]].tolist() == [*start]:
            return ids
        return [*(self.target_size + d for d in start), *ids]

    def read(self, token: int) -> tuple[int, ...]:
        """Shared ids of a target token."""
        if token in self.pairs:
            return (token,)
        if token not in self._read:
            piece = self.target.pieces[token] if token < len(self.target.pieces) else b""
            own = [d for d in self.draft.spell(piece) if d < self.draft_size]
            self._read[token] = tuple(self.target_size + d for d in own)
        return self._read[token]

    def to_draft(self, ids: Tensor) -> Tensor:
        """Draft ids of shared ones, any shape."""
        return self.own_ids[ids]

    def to_target(self, logits: Tensor) -> Tensor:
        """From logits [..., Vd] of the draft model to [..., V] over the target's ids."""
        return spread(logits[..., self.draft_ids], self.target_ids, self.target_size)


class OwnRows:
    """The texts of a batch in a draft model's ids: int32 [B, S], without padding on the left."""

    def __init__(self, batch: int, device: torch.device):
        self.tokens = torch.zeros(batch, GROWTH, dtype=torch.int32, device=device)
        self.counts = [0] * batch

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.counts, dtype=torch.int32, device=self.tokens.device)

    def write(self, b: int, start: int, ids: Sequence[int]) -> None:
        """Row b becomes its first `start` ids and these."""
        self.counts[b] = end = start + len(ids)
        if end > self.tokens.shape[1]:
            more = self.tokens.new_zeros(len(self.tokens), 2 * end - self.tokens.shape[1])
            self.tokens = torch.cat([self.tokens, more], 1)
        if ids:
            self.tokens[b, start:end] = torch.tensor(ids, dtype=torch.int32)


class IntersectionDrafter(DraftModelDrafter):
    """`DraftModelDrafter` over shared ids. options: those of DraftModelDrafter."""

    def __init__(self, model: DraftModel, intersection: Intersection, **options: Any):
        super().__init__(model, **options)
        self.intersection = intersection

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        super().begin(tokens, lens, features)
        self._seen = [0] * len(tokens)
        self._own = OwnRows(len(tokens), tokens.device)

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """As far as the texts were read: the rest waits until something is drafted."""
        return super().confidence(tokens, self._own.lens)

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        own, kv = self._own, self.model.kv
        for b, fresh in enumerate(unseen(tokens, lens, self._seen)):
            ids = [i for token in fresh for i in self.intersection.read(token)]
            have = own.counts[b]
            own.write(b, have, ids if have else self.intersection.begin(ids))
        # The root is read again where what followed it spells nothing.
        kv.set_lens([min(have, n - 1) for have, n in zip(kv.lens, own.counts, strict=True)])
        tree = super().propose(own.tokens, own.lens, sampling, max_nodes, max_depth)
        # The own text may end before the root, or in several tokens for it.
        slots = torch.arange(tree.width, device=tokens.device)
        drafted = (slots > 0) & (slots < tree.num_nodes[:, None])
        roots = roots_of(tokens, lens)[:, None]
        return tree._replace(draft_token_ids=torch.where(drafted, tree.draft_token_ids, roots))


def unseen(tokens: Tensor, lens: Tensor, seen: list[int]) -> list[list[int]]:
    """Each row's tokens behind the first `seen`, which is brought up to date."""
    fresh = []
    for b, length in enumerate(lens.tolist()):
        fresh.append(tokens[b, seen[b] : length].tolist())
        seen[b] = length
    return fresh
