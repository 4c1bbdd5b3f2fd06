"""A transformers model as the loop and the drafters use it: prefill its own way, windows ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_kernels.cache import RaggedKV
from specdec_kernels.dispatch import asked_for
from specdec_kernels.hf.attention import Flip, UnsupportedModelError, Window
from specdec_kernels.hf.buffers import WindowBuffers
from specdec_kernels.hf.cache import RaggedCache
from specdec_kernels.hf.compiled import CompiledForwards, let_capacity_vary, logits_of
from specdec_kernels.hf.features import FeatureTap, compacted
from specdec_kernels.hf.graphs import (
    Outputs,
    Recordings,
    Shelf,
    can_record,
    state_of,
    why_not_recorded,
)
from specdec_kernels.hf.invariant import Survey
from specdec_kernels.hf.layers import LayerFlip
from specdec_kernels.hf.steps import Findings, Steps
from specdec_kernels.hf.support import cache_argument
from specdec_kernels.tree import DraftTree

SPLIT_SIZE = 512


def max_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class Runner:
    """Runs forwards with our attention and our layers; it outlives the runs, and keeps no model.

    linear, graphs, compile: as in SpeculativeConfig.
    """

    def __init__(
        self, model: PreTrainedModel, linear: str, graphs: str = "off", compile: bool = False
    ):
        self.flip = Flip(model)
        self.invariant = linear == "invariant"
        ours = linear != "off" and not compile
        self.layers = LayerFlip(model, invariant=self.invariant) if ours else None
        self.split_size = SPLIT_SIZE if self.invariant else 0
        self.graphs = graphs
        self.compiled = CompiledForwards() if compile else None
        self.findings = Findings()
        self.shelf = Shelf()
        self._surveyed: set[bool] = set()

    def prefill(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.layers is None else self.layers.prefill()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Around many forwards of this thread."""
        return contextlib.nullcontext() if self.layers is None else self.layers.hold()

    def logits(
        self,
        model: PreTrainedModel,
        window: Window,
        inputs: dict[str, Any],
        warn: Callable[[str], None],
    ) -> Tensor:
        """Logits [B, T, V] of a forward over `window`."""
        if self.invariant:
            self._survey(model, window, inputs, warn)
        return self._forward(model, window, inputs)

    def records(self, device: torch.device) -> bool:
        """Whether verify forwards on this device are recorded, unless something stands against."""
        return self.graphs == "auto" and can_record(device) and not self.invariant

    def compiled_logits(
        self, model: PreTrainedModel, window: Window, inputs: dict[str, Any]
    ) -> Tensor:
        """`logits`, compiled where that is asked for; one compilation per shape of the window."""
        if self.compiled is None:
            return self._forward(model, window, inputs)
        return self._forward(
            model, window, inputs, self.compiled.of(tuple(window.tree.draft_token_ids.shape))
        )

    def _forward(
        self,
        model: PreTrainedModel,
        window: Window,
        inputs: dict[str, Any],
        forward: Callable[..., Tensor] = logits_of,
    ) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.flip.verify(window))
            if self.layers is not None:
                stack.enter_context(self.layers.verify(window.tree.draft_token_ids.numel()))
            logits = forward(model, inputs)
        if window.calls == 0:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not use the attention interface"
            )
        return logits

    def _survey(
        self,
        model: PreTrainedModel,
        window: Window,
        inputs: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """Watches the first forward of one slot and the first of several: code may tell them apart.

        The forward itself comes afterwards and writes the same slots of the cache again.
        """
        single = window.tree.width == 1
        if single in self._surveyed:
            return
        assert self.layers is not None
        with Survey() as survey:
            self._forward(model, window, inputs)
        self._surveyed.add(single)
        hopeless = self.layers.treat(survey)
        if asked_for() not in ("", "cpu"):
            hopeless.insert(0, f"it needs the backend cpu, not {asked_for()}")
        if hopeless:
            warn(
                "linear='invariant' cannot promise the same bits with and without drafts: "
                + "; ".join(hopeless[:3])
                + (f"; and {len(hopeless) - 3} more" if len(hopeless) > 3 else "")
            )


class CachedModel:
    """A model in one run, with the run's ragged K/V.

    max_slots: the most that a row's K/V will need. warn: told what `Runner` cannot promise.
    hidden_layers: ids of hidden states, see `FeatureTap`; `features` holds those of the last
        forward, [B, T, L * d] for a window, and without padding on the left for prompts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        runner: Runner,
        batch: int,
        max_slots: int,
        device: torch.device,
        warn: Callable[[str], None],
        hidden_layers: Sequence[int] = (),
    ):
        self.model, self.runner, self.warn = model, runner, warn
        self.tap = FeatureTap(model, hidden_layers)
        self.features: Tensor | None = None
        self.cache: RaggedCache | None = None
        recorded = runner.records(device)
        kept = runner.shelf.take(model, batch, max_slots) if recorded else None
        self.kv = RaggedKV(batch, max_slots, device) if kept is None else kept.kv
        self.steps: Steps | None = None
        if recorded or runner.compiled is not None:
            recordings = kept or Recordings(self.kv, state_of(model))
            self.steps = Steps(
                self._plain, self._fixed, recordings, runner.findings, warn, record=recorded
            )
            reason = why_not_recorded(model) if recorded else None
            if reason is not None:
                self.steps.refuse(reason)

    def prefill_by(self, forward: Callable[[dict[str, Any]], Any], lens: list[int]) -> Any:
        """Stores the K/V of left-padded rows of `lens` tokens, by the model's own attention.

        forward: runs the model with the arguments that it is given, and its own.
        """
        self.cache = RaggedCache(self.model, self.kv, lens)
        with self.runner.prefill(), self.tap.caught() as caught:
            output = forward({cache_argument(self.model): self.cache, "use_cache": True})
        self.cache.end_prefill()
        features = self.tap.joined(caught)
        self.features = None if features is None else compacted(features, lens)
        return output

    def forward(self, tree: DraftTree) -> Tensor:
        """Logits [B, T, V], which hold until the next forward; the window's K/V lie behind the
        rows' prefixes afterwards.
        """
        forward = self._plain if self.steps is None else self.steps.run
        logits, self.features = forward(tree)
        return logits

    @property
    def prepared(self) -> bool:
        """Whether the last forward did work that later ones of its width need not do."""
        return self.steps is not None and self.steps.prepared

    def end(self) -> None:
        """After the run, whatever its end: what was recorded is kept for the next one."""
        if self.steps is not None:
            self.runner.shelf.put(self.model, self.steps.recordings)

    def _plain(self, tree: DraftTree) -> Outputs:
        prefix = self.kv.prefix_len.long()[:, None]
        slots = torch.arange(tree.width, device=prefix.device)
        depth = slots if tree.depth is None else tree.depth
        # Behind its nodes a row may stand beyond the last position that the model has.
        positions = (prefix + depth) * (slots < tree.num_nodes[:, None])
        inputs = self._inputs(tree, positions, max(self.kv.lens) + slots)
        with self.tap.caught() as caught:
            logits = self.runner.logits(self.model, self._window(tree), inputs, self.warn)
        return logits, self.tap.joined(caught)

    def _fixed(self, buffers: WindowBuffers) -> Outputs:
        """The same over buffers, without a number of the host's that changes between steps."""
        assert self.cache is not None
        tree = buffers.tree
        inputs = self._inputs(tree, buffers.position_ids(), buffers.cache_position())
        if self.runner.compiled is not None:
            let_capacity_vary(self.kv)
        self.cache.places = buffers.places()
        try:
            with self.tap.caught() as caught:
                logits = self.runner.compiled_logits(self.model, self._window(tree), inputs)
        finally:
            self.cache.places = None
        return logits, self.tap.joined(caught)

    def _window(self, tree: DraftTree) -> Window:
        assert self.cache is not None
        return Window(tree, self.kv.prefix_len, self.cache.sliding, self.runner.split_size)

    def _inputs(
        self, tree: DraftTree, position_ids: Tensor, cache_position: Tensor
    ) -> dict[str, Any]:
        inputs = {
            "input_ids": tree.draft_token_ids,
            "position_ids": position_ids,
            cache_argument(self.model): self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if not hasattr(self.model, "_prefill"):
            inputs["cache_position"] = cache_position
        return inputs
