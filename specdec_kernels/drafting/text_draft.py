"""A draft model with another tokenizer writes text, which the target's tokenizer then encodes.

Both models read their own tokens of the same text. Where the last of the draft model's tokens could
begin a longer one that the target would have had to write in several, the draft model chooses that
token again, among those that begin with its text. What was drafted stays in the draft model's cache
as far as the text that is then committed encodes to the same tokens.
Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", 2025 (SLEM); transformers calls it universal assisted generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.drafting.draft_model import DraftModel, DraftModelDrafter
from specdec_kernels.drafting.intersection import OwnRows, unseen
from specdec_kernels.drafting.none import roots_only
from specdec_kernels.drafting.transcript import TextTranslation, Transcript
from specdec_kernels.drafting.window import chains
from specdec_kernels.tree import Decision, DraftTree, SamplingParams, roots_of


@dataclass
class Writing:
    """What the draft model writes in one row: tokens `ids`, whose bytes are `text`.

    most: tokens at most. must: bytes that the text has to begin with. end: the target's id of a
    special token behind it.
    """

    most: int
    must: bytes = b""
    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    end: int | None = None
    going: bool = True

    @property
    def missing(self) -> bytes:
        """What the next tokens have to begin with, or to be the beginning of."""
        return self.must[len(self.text) :]

    def take(self, token: int, piece: bytes) -> None:
        self.ids.append(token)
        self.text += piece
        self.going = len(self.ids) < self.most


class TextDrafter(DraftModelDrafter):
    """`DraftModelDrafter` over the draft model's own tokens; chains of likeliest tokens.

    options: those of DraftModelDrafter; drafts are neither drawn nor do they branch.
    """

    def __init__(self, model: DraftModel, translation: TextTranslation, **options: Any):
        super().__init__(model, **options)
        self.translation = translation

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        super().begin(tokens, lens, features)
        batch = len(tokens)
        self._seen = [0] * batch
        self._own = OwnRows(batch, tokens.device)
        self._texts = [Transcript(self.translation) for _ in range(batch)]
        self._cached: list[list[int]] = [[] for _ in range(batch)]  # ids whose K/V there is
        self._true = [0] * batch  # how many of them are known to be the text's

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """As far as the texts were read: the rest waits until something is drafted."""
        return super().confidence(tokens, self._own.lens)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        """The next proposal finds out how much of the cache still stands."""

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        drafting = [min(n - 1, depth) > 0 for n, depth in zip(max_nodes, max_depth, strict=True)]
        if not any(drafting):
            return roots_only(tokens, lens, max_nodes)
        self._follow(tokens, lens)
        limits = zip(max_nodes, max_depth, self._own.counts, strict=True)
        depths = [min(nodes - 1, depth, self._room(n)) if n else 0 for nodes, depth, n in limits]
        depths = [depth if depth >= self.min_tokens else 0 for depth in depths]
        if not any(depths):
            return roots_only(tokens, lens, max_nodes)
        started = time.perf_counter()
        writings = self._write(depths)
        self.model.cost.record(len(depths), max(max_nodes) - 1, time.perf_counter() - started)
        drafts = [self._draft(b, w, depths[b]) for b, w in enumerate(writings)]
        width = 1 + max(map(len, drafts))
        roots = roots_of(tokens, lens).tolist()
        ids = [[r, *d, *[r] * (width - 1 - len(d))] for r, d in zip(roots, drafts, strict=True)]
        nodes = [len(d) + 1 if n else 0 for d, n in zip(drafts, max_nodes, strict=True)]
        return chains(torch.tensor(ids, device=tokens.device), nodes)

    def _follow(self, tokens: Tensor, lens: Tensor) -> None:
        """Reads what was committed, and keeps of the cache what still stands, but two tokens."""
        kept = []
        for b, fresh in enumerate(unseen(tokens, lens, self._seen)):
            text, cached = self._texts[b], self._cached[b]
            unchanged = text.add(fresh)
            start = min(unchanged, self._own.counts[b])
            self._own.write(b, start, text.ids[start:])
            same = min(unchanged, self._true[b])
            end = min(len(cached), len(text.ids) - 2)
            while same < end and cached[same] == text.ids[same]:
                same += 1
            kept.append(max(min(same, end), 0))
            del cached[kept[b] :]
        self.model.kv.set_lens(kept)

    def _write(self, depths: list[int]) -> list[Writing]:
        own, kv = self._own, self.model.kv
        rows = list(range(len(depths)))
        if not any(kv.lens):
            prompts = zip(own.counts, depths, strict=True)
            self.model.prefill(own.tokens, [max(n - 2, 0) if depth else 0 for n, depth in prompts])
        unread = self._catch_up(own.tokens, own.counts, depths, leave=2)
        logits = self._read_text(own.tokens, unread)
        earlier = logits[rows, [max(n - 2, 0) for n in unread]]
        logits = logits[rows, [max(n - 1, 0) for n in unread]]
        writings = [
            self._begin(b, depth, earlier[b] if unread[b] > 1 else None)
            for b, depth in enumerate(depths)
        ]
        self._true = [n - len(w.ids) for n, w in zip(kv.lens, writings, strict=True)]
        kv.set_lens(self._true)
        for b, have in enumerate(self._true):
            self._cached[b] += self._texts[b].ids[len(self._cached[b]) : have]
        begun = [bool(w.ids) for w in writings]
        while True:
            self._extend(writings, logits, begun)
            if not any(w.going for w in writings):
                break
            last = torch.tensor([[w.ids[-1] if w.going else 0] for w in writings])
            going = [int(w.going) for w in writings]
            logits = self._read(last.to(logits.device), going)[:, 0]
            for cached, w in zip(self._cached, writings, strict=True):
                cached += w.ids[-1:] if w.going else []
            begun = [False] * len(rows)
        return writings

    def _begin(self, b: int, depth: int, logits: Tensor | None) -> Writing:
        """Perhaps with another last token than the text's, by the logits [V] before that.

        Not with one that the target has a token for as well: it would have written that.
        """
        text, draft, target = self._texts[b], self.translation.draft, self.translation.target
        pending = text.pending
        writing = Writing(depth, pending, going=depth > 0)
        last = text.ids[-1] if text.ids else 0
        piece = b"" if last in draft.specials else draft.pieces[last]
        if logits is None or not depth or not piece:
            return writing
        best = self._best(logits, draft.beginning_with(piece + pending))
        if best is None or last >= len(logits) or not logits[best] > logits[last]:
            return writing
        more, latest = draft.pieces[best][len(piece) :], text.tail[-1]
        before = target.pieces[latest] if latest < len(target.pieces) else b""
        if before + more[len(pending) :] not in target.ids:
            writing.take(best, more)
        return writing

    def _extend(self, writings: list[Writing], logits: Tensor, begun: list[bool]) -> None:
        """One more token for each row that goes on, but for those that have `begun`."""
        draft, best = self.translation.draft, logits.argmax(-1).tolist()
        unlikely = (self._best_logprobs(logits, False) < self.least).tolist()
        for b, w in enumerate(writings):
            if not w.going or begun[b]:
                continue
            token: int | None = best[b]
            if w.missing:
                shorter = torch.tensor(draft.within(w.missing), dtype=torch.int64)
                longer = draft.beginning_with(w.missing)
                token = self._best(logits[b], torch.cat([longer, shorter]))
            elif unlikely[b]:
                token = None
            piece = b"" if token is None else draft.pieces[token]
            if token is None or token in draft.specials or not piece:
                w.going = False
                w.end = None if token is None else self.translation.to_target.get(token)
            else:
                w.take(token, piece)

    @staticmethod
    def _best(logits: Tensor, ids: Tensor) -> int | None:
        """The likeliest of these tokens, on one row's logits [V]."""
        ids = ids[ids < len(logits)].to(logits.device)
        return int(ids[logits[ids].argmax()]) if len(ids) else None

    def _draft(self, b: int, writing: Writing, depth: int) -> list[int]:
        """What was written as tokens of the target."""
        if writing.missing or not depth:
            return []
        new = writing.text[len(writing.must) :]
        ids = self.translation.as_target(self._texts[b].tail, new)
        ids += [] if writing.end is None else [writing.end]
        draft: list[int] = []
        for token in ids[:depth]:
            if token >= self.translation.sizes[0]:
                break
            draft.append(token)
            if token in self.eos_token_ids:
                break
        return draft if len(draft) >= self.min_tokens else []
