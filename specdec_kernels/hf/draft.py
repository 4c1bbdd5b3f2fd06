"""A draft model: loaded, checked against its target, and as drafters see it in one run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.intersection import Intersection
from specdec_kernels.drafting.transcript import TextTranslation
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.model import CachedModel, Runner, max_positions
from specdec_kernels.hf.support import support, unwrap
from specdec_kernels.hf.translation import PADDING, Wanted, translation_for, vocab_size
from specdec_kernels.tree import DraftTree

__all__ = ["PADDING", "Draft", "DraftRun", "load_draft", "weight_of"]
PLAIN = Wanted()


class Draft:
    """What outlives the runs: the model, its switches and its measured cost.

    translation: where its tokenizer is not the target's. vocab: ids from here on are not drafted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        linear: str,
        translation: Intersection | TextTranslation | None = None,
    ):
        self.model = model
        self.runner = Runner(model, "off" if linear == "off" else "auto")
        self.translation = translation
        self.vocab = min(vocab_size(model), vocab_size(target))
        if isinstance(translation, TextTranslation):  # the rest is padding, which says nothing
            self.vocab = min(vocab_size(model), len(translation.draft.pieces))
        self.cost = DraftCost(weight_of(model) / max(weight_of(target), 1))

    def run(
        self, batch: int, max_slots: int, device: torch.device, warn: Callable[[str], None]
    ) -> DraftRun:
        return DraftRun(self, batch, max_slots, device, warn)


class DraftRun(CachedModel):
    """The `DraftModel` of one run."""

    def __init__(
        self,
        draft: Draft,
        batch: int,
        max_slots: int,
        device: torch.device,
        warn: Callable[[str], None],
    ):
        super().__init__(draft.model, draft.runner, batch, max_slots, device, warn)
        self.cost = draft.cost
        self.max_positions = max_positions(draft.model)
        self.translation = draft.translation
        self.vocab = draft.vocab
        self.own_vocab = vocab_size(draft.model)

    def prefill(self, tokens: Tensor, lens: list[int]) -> None:
        """Rows of length 0 are not read: a single token stands for them, and is not kept."""
        width = max(*lens, 1)
        ids = torch.zeros(len(lens), width, dtype=torch.int64, device=tokens.device)
        mask = torch.zeros_like(ids)
        for b, length in enumerate(lens):
            start = width - max(length, 1)
            ids[b, start:] = tokens[b, : width - start]
            mask[b, start:] = 1
        self.prefill_by(lambda inputs: self._forward_prefill(ids, mask, inputs), lens)

    def _forward_prefill(self, ids: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Any:
        inputs = {
            **inputs,
            "input_ids": self._known(ids),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
        if not hasattr(self.model, "_prefill"):
            inputs["cache_position"] = torch.arange(ids.shape[1], device=ids.device)
        return self.model.base_model(**inputs)

    def forward(self, tree: DraftTree) -> Tensor:
        known = tree._replace(draft_token_ids=self._known(tree.draft_token_ids))
        logits = super().forward(known)
        if isinstance(self.translation, Intersection):
            return self.translation.to_target(logits)
        return logits[..., : self.vocab]

    def _known(self, ids: Tensor) -> Tensor:
        """The model's own ids; those that it lacks become token 0: it is a guess in any case."""
        if isinstance(self.translation, Intersection):
            return self.translation.to_draft(ids)
        return ids.masked_fill(ids >= self.own_vocab, 0)


def load_draft(source: Any, target: PreTrainedModel, linear: str, wanted: Wanted = PLAIN) -> Draft:
    """The draft model, if it can draft for `target`.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    model = unwrap(_load(source, target))
    if model is target:
        raise ValueError("model: expected another model than the one that it drafts for")
    reason = support(model).reason
    if reason:
        raise ValueError(f"model: {type(model).__name__} cannot draft: {reason}")
    if model.training:
        raise ValueError("model: expected a model in evaluation mode; call its eval()")
    if model.device != target.device:
        raise ValueError(
            f"model: expected the draft model on {target.device}, got one on {model.device}"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and bool(parameter.detach().amax().isnan()):
            raise ValueError(f"model: expected weights without NaN, got some in {name}")
    translation = translation_for(model, target, wanted, download=isinstance(source, str))
    draft = Draft(model, target, linear, translation)
    _try(draft)
    return draft


def _load(source: Any, target: PreTrainedModel) -> Any:
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(unwrap(source), PreTrainedModel):
            raise TypeError(
                "model: expected a folder, a Hub id or a transformers model, "
                f"got {type(source).__name__}"
            )
        return source
    try:
        model = AutoModelForCausalLM.from_pretrained(os.fspath(source), dtype=target.dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            "model: expected the folder or Hub id of a causal language model, "
            f"got {os.fspath(source)!r}: {error}"
        ) from error
    return model.to(target.device)


@torch.no_grad()
def _try(draft: Draft) -> None:
    """Two small forwards: what the model cannot do shows here rather than in `generate`."""
    run = DraftRun(draft, 2, 8, draft.model.device, lambda text: None)
    tokens = torch.ones(2, 4, dtype=torch.int32, device=draft.model.device)
    try:
        run.prefill(tokens, [2, 1])
        run.kv.reserve(4)
        window = DraftTree.from_lists([[1, 1, 1], [1]], [[-1, 0, 0], [-1]])
        run.forward(window)
    except UnsupportedModelError as error:
        raise ValueError(f"model: {type(draft.model).__name__} cannot draft: {error}") from error


def weight_of(model: PreTrainedModel) -> int:
    """What a forward of one token reads, roughly: the weights, a table of embeddings left out."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is table
    return sum(p.numel() for p in model.parameters()) - (0 if tied else table.numel())
