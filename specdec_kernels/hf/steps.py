"""The verify forwards of a run at few widths, recorded or compiled once for each of them.

Lengths are tensors there, so that no step needs a new recording or compilation. Whatever stands
against it, the plain forwards go on and the reason is said once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec_kernels.hf.buffers import WindowBuffers, bucket_of
from specdec_kernels.hf.graphs import Outputs, Recordings
from specdec_kernels.tree import DraftTree

# How far two ways to run a forward may lie apart, relative to the largest logit.
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 5e-2


@dataclass
class Findings:
    """What is known of a model's forwards over buffers; kept between runs.

    shown: kinds of windows (of one slot, or not) for which they give what plain forwards give.
    reason: why they are not used.
    """

    shown: set[bool] = field(default_factory=set)
    reason: str | None = None


class Steps:
    """Runs a tree as a padded window over buffers.

    plain: the forward that is always right. fixed: the same over buffers; it reads no number of
        the host's that changes between steps, and may be compiled.
    record: whether `fixed` is recorded as a CUDA graph.
    """

    def __init__(
        self,
        plain: Callable[[DraftTree], Outputs],
        fixed: Callable[[WindowBuffers], Outputs],
        recordings: Recordings,
        findings: Findings,
        warn: Callable[[str], None],
        *,
        record: bool,
    ):
        self.plain, self.fixed, self.recordings = plain, fixed, recordings
        self.findings, self.warn, self.record = findings, warn, record
        self.prepared = False  # whether the last forward did what later ones need not do
        self._buffers: dict[int, WindowBuffers] = {}
        self._capacity = recordings.kv.capacity

    def run(self, tree: DraftTree) -> Outputs:
        """Logits and features of the tree's slots; the logits hold until the next forward."""
        self.prepared = False
        if self.findings.reason is not None:
            return self.plain(tree)
        width, kv = bucket_of(tree.width), self.recordings.kv
        kv.reserve(max(kv.lens) + width)
        if kv.capacity != self._capacity:
            self._capacity = kv.capacity
            self.recordings.by_width.clear()
        if (width == 1) not in self.findings.shown:
            return self._show(tree, width)
        try:
            logits, features = self._run(tree, width)
        except Exception as error:  # any that the model's code raises while it is recorded
            self.refuse(_text(error))
            return self.plain(tree)
        # A drafter may read features several steps later, when it drafts again.
        kept = None if features is None else features[:, : tree.width].clone()
        return logits[:, : tree.width], kept

    def _run(self, tree: DraftTree, width: int) -> Outputs:
        if not self.record:
            self.prepared = width not in self._buffers
            buffers = self._filled(tree, width)
            return self.fixed(buffers)
        by_width = self.recordings.by_width
        if width not in by_width:
            self.prepared = True
            buffers = self._filled(tree, width)
            self.recordings.record(buffers, lambda: self.fixed(buffers))
        buffers, graph = by_width[width]
        buffers.fill(tree)
        return graph.replay()

    def _show(self, tree: DraftTree, width: int) -> Outputs:
        """The plain forward, and whether the fixed one gives the same: code of the model may count
        with the length of the cache, or tell a window of one slot from others.
        """
        self.prepared = True
        got, reason = None, "the model counts with the cache's length"
        try:
            got = self.fixed(self._filled(tree, width))
        except Exception as error:
            reason = _text(error)
        expected = self.plain(tree)  # last, as both write the window's K and V
        if got is None or not _agree(got, expected, tree):
            self.refuse(reason)
        else:
            self.findings.shown.add(width == 1)
        return expected

    def _filled(self, tree: DraftTree, width: int) -> WindowBuffers:
        if width not in self._buffers:
            self._buffers[width] = WindowBuffers(self.recordings.kv, width)
        self._buffers[width].fill(tree)
        return self._buffers[width]

    def refuse(self, reason: str) -> None:
        """From now on all forwards are plain."""
        self.findings.reason = reason = " ".join(reason.split())[:300]
        self.recordings.by_width.clear()
        way = "recorded" if self.record else "compiled"
        self.warn(f"verify forwards are not {way}: {reason}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _agree(got: Outputs, expected: Outputs, tree: DraftTree) -> bool:
    """Whether most slots agree: a router of experts may decide a near tie otherwise."""
    real = torch.arange(tree.width, device=tree.num_nodes.device) < tree.num_nodes[:, None]
    for ours, theirs in zip(got, expected, strict=True):
        if ours is None or theirs is None:
            continue
        want = theirs[real].float()
        apart = (ours[:, : tree.width][real].float() - want).abs().amax(1)
        tolerance = TOLERANCE if theirs.dtype == torch.float32 else TOLERANCE_16_BIT
        if not apart.nan_to_num(nan=float("inf")).median() <= tolerance * want.abs().amax():
            return False
    return True
