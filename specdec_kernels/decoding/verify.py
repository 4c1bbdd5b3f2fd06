"""How a step decides which drafted tokens stand: by kernel, or by a walk through processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec_kernels.decoding.history import TokenHistory
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import Acceptance, Decision, DraftTree, SamplingParams


class Verifier(Protocol):
    def at(self, rows: Rows) -> SamplingParams | None:
        """The sampling parameters with each row's current counters; None when greedy."""

    def first(self, logits: Tensor, rows: Rows) -> None:
        """Emits each row's first token from the prefill logits [B, V]."""

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        """Emits what the logits [B, T, V] of the window allow."""


class KernelVerifier:
    """What the kernels do themselves.

    sampling: None means greedy with nothing that changes the logits.
    history: the token lists of penalties and biases.
    masks: given the rows, the tree (None: the prompts alone) and the vocabulary's size, the
        `allowed_tokens` of SamplingParams.
    rule, posterior_threshold, posterior_alpha: as in `rejection_sample`.
    """

    def __init__(
        self,
        sampling: SamplingParams | None,
        *,
        history: TokenHistory | None = None,
        masks: Callable[[Rows, DraftTree | None, int], Tensor] | None = None,
        rule: str = "auto",
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
    ):
        self.sampling = sampling
        self.history = history
        self.masks = masks
        self.rule = rule
        self.posterior_threshold = posterior_threshold
        self.posterior_alpha = posterior_alpha
        self.step = 0  # of the prompts; every verification counts one on

    def at(self, rows: Rows) -> SamplingParams | None:
        if self.sampling is None:
            return None
        sampling = self.sampling._replace(
            position=rows.lens.long(), step=torch.full_like(self.sampling.step, self.step)
        )
        return sampling if self.history is None else self.history.onto(sampling)

    def first(self, logits: Tensor, rows: Rows) -> None:
        sampling = self.at(rows)
        if sampling is None:
            tokens = logits.argmax(-1)
        else:
            if self.rule == "block":  # all its counters are steps: no position may equal one
                sampling = sampling._replace(position=sampling.step)
            tokens = sample(logits, self._masked(sampling, rows, None, logits))
        for b, token in enumerate(tokens.tolist()):
            self._push(b, [token], rows, accepted=0)
        self.step += 1

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        sampling = self.at(rows)
        draft = (tree.draft_token_ids, tree.parents, tree.num_nodes)
        if sampling is None:
            acceptance = verify_greedy(logits, *draft)
        else:
            acceptance = rejection_sample(
                logits,
                *draft,
                self._masked(sampling, rows, tree, logits),
                draft_logits=tree.draft_logits,
                draft_vocab_map=tree.draft_vocab_map,
                rule=self.rule,
                posterior_threshold=self.posterior_threshold,
                posterior_alpha=self.posterior_alpha,
            )
        self.step += 1
        return self._emit(acceptance, rows)

    def _masked(
        self, sampling: SamplingParams, rows: Rows, tree: DraftTree | None, logits: Tensor
    ) -> SamplingParams:
        if self.masks is None:
            return sampling
        return sampling._replace(allowed_tokens=self.masks(rows, tree, logits.shape[-1]))

    def _emit(self, acceptance: Acceptance, rows: Rows) -> Decision:
        host = torch.cat([acceptance.num_accepted[:, None].long(), acceptance.output_token_ids], 1)
        num_accepted, num_kept = [], []
        for b, (accepted, *tokens) in enumerate(host.tolist()):
            num_accepted.append(accepted)
            num_kept.append(self._push(b, tokens[: accepted + 1], rows, accepted))
        return Decision(acceptance.path, num_accepted, num_kept)

    def _push(self, b: int, tokens: Sequence[int], rows: Rows, accepted: int) -> int:
        """Emits tokens until the row is finished; how many those were."""
        kept = 0
        while kept < len(tokens) and not rows.done[b]:
            rows.push(b, tokens[kept], drafted=kept < accepted)
            kept += 1
        if self.history is not None:
            self.history.push(b, tokens[:kept])
        return kept


class WalkVerifier:
    """Asks `pick(rows, logits [n, V])` for the rows' next tokens along their accepted paths.

    All rows that are still walking are asked about together, level by level. A row is asked once
    per emitted token, in order, when all that was emitted before is known: these are the calls that
    plain decoding would make.
    """

    def __init__(self, pick: Callable[[list[int], Tensor], list[int]]):
        self.pick = pick

    def at(self, rows: Rows) -> SamplingParams | None:
        return None

    def first(self, logits: Tensor, rows: Rows) -> None:
        for b, token in enumerate(self.pick(list(range(len(rows))), logits)):
            rows.push(b, token)

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        slots: list[list[int]] = [[0] if n else [] for n in tree.num_nodes.tolist()]
        children = children_by_token(tree)
        num_accepted = [0] * len(slots)
        walking = [b for b, path in enumerate(slots) if path]
        while walking:
            tokens = self.pick(walking, logits[walking, [slots[b][-1] for b in walking]])
            further = []
            for b, token in zip(walking, tokens, strict=True):
                child = children[b].get((slots[b][-1], token))
                num_accepted[b] += child is not None
                if not rows.push(b, token, drafted=child is not None) and child is not None:
                    slots[b].append(child)
                    further.append(b)
            walking = further
        path = torch.full_like(tree.parents, -1)
        for b, kept in enumerate(slots):
            path[b, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        return Decision(path, num_accepted, [len(kept) for kept in slots])


def children_by_token(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Per row the slot of each (parent slot, token), the lowest one among equal siblings."""
    tokens, parents = tree.draft_token_ids.tolist(), tree.parents.tolist()
    return [
        {(parents[b][slot], tokens[b][slot]): slot for slot in reversed(range(1, nodes))}
        for b, nodes in enumerate(tree.num_nodes.tolist())
    ]
