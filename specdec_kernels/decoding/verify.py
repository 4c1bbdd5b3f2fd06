"""How a step decides which drafted tokens stand: by kernel, or by a walk through processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specdec_kernels.decoding.rows import Rows
from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import Decision, DraftTree, SamplingParams


class Verifier(Protocol):
    def at(self, rows: Rows) -> SamplingParams | None:
        """The sampling parameters with each row's current position; None when greedy."""

    def first(self, logits: Tensor, rows: Rows) -> None:
        """Emits each row's first token from the prefill logits [B, V]."""

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        """Emits what the logits [B, T, V] of the window allow."""


class KernelVerifier:
    """Greedy, or sampling whose parameters the kernels know. `sampling` None means greedy."""

    def __init__(self, sampling: SamplingParams | None):
        self.sampling = sampling

    def at(self, rows: Rows) -> SamplingParams | None:
        if self.sampling is None:
            return None
        return self.sampling._replace(position=rows.lens.long())

    def first(self, logits: Tensor, rows: Rows) -> None:
        sampling = self.at(rows)
        tokens = logits.argmax(-1) if sampling is None else sample(logits, sampling)
        for b, token in enumerate(tokens.tolist()):
            rows.push(b, token)

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        sampling = self.at(rows)
        draft = (tree.draft_token_ids, tree.parents, tree.num_nodes)
        if sampling is None:
            acceptance = verify_greedy(logits, *draft)
        else:
            acceptance = rejection_sample(logits, *draft, sampling, rule="coupled")
        host = torch.cat([acceptance.num_accepted[:, None].long(), acceptance.output_token_ids], 1)
        num_accepted, num_kept = [], []
        for b, (accepted, *tokens) in enumerate(host.tolist()):
            kept = 0
            while kept <= accepted and not rows.done[b]:
                rows.push(b, tokens[kept], drafted=kept < accepted)
                kept += 1
            num_accepted.append(accepted)
            num_kept.append(kept)
        return Decision(acceptance.path, num_accepted, num_kept)


class WalkVerifier:
    """Asks `pick(row, logits [V])` for one token after the other along the accepted path.

    The logits processors see exactly the calls that plain decoding would make: once per emitted
    token, in order, on the true prefix.
    """

    def __init__(self, pick: Callable[[int, Tensor], int]):
        self.pick = pick

    def at(self, rows: Rows) -> SamplingParams | None:
        return None

    def first(self, logits: Tensor, rows: Rows) -> None:
        for b in range(len(rows)):
            rows.push(b, self.pick(b, logits[b]))

    def verify(self, logits: Tensor, tree: DraftTree, rows: Rows) -> Decision:
        path = torch.full_like(tree.parents, -1)
        num_accepted, num_kept = [], []
        token_rows, parent_rows = tree.draft_token_ids.tolist(), tree.parents.tolist()
        for b, nodes in enumerate(tree.num_nodes.tolist()):
            children = {
                (parent_rows[b][slot], token_rows[b][slot]): slot
                for slot in reversed(range(1, nodes))
            }
            slots: list[int] = []
            slot = 0 if nodes else None
            while slot is not None:
                slots.append(slot)
                token = self.pick(b, logits[b, slot])
                child = children.get((slot, token))
                slot = None if rows.push(b, token, drafted=child is not None) else child
            path[b, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
            num_accepted.append(max(len(slots) - 1, 0))
            num_kept.append(len(slots))
        return Decision(path, num_accepted, num_kept)
