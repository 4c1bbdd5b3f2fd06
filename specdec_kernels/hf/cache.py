"""Our ragged KV storage as a transformers Cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from specdec_kernels.cache import RaggedKV

FAR = 1 << 20
ROLLBACK_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class RaggedLayer(CacheLayerMixin):
    """One layer's view of the storage. Sliding layers keep their full length."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, store: RaggedCache, index: int):
        super().__init__()
        self.cache = store
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.cache.prefilling:
            self.cache.kv.write_prefill(self.index, k, v, self.cache.prompt_lens)
            return k, v
        if self.cache.places is not None:
            return self.cache.kv.write_at(self.index, k, v, self.cache.places)
        return self.cache.kv.write_window(self.index, k, v)

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        length = query if isinstance(query, int) else query.shape[0]
        return self.get_seq_length() + length, 0

    def get_seq_length(self, *args: Any) -> int:
        if self.cache.prefilling:
            return 0
        if self.cache.places is not None:
            return FAR
        return max(self.cache.kv.lens)

    def get_max_length(self) -> int:
        return self.cache.kv.max_slots

    get_max_cache_shape = get_max_length


class RaggedCache(Cache):
    """In prefill, K and V pass through to the model's own attention and are stored compacted.

    places: set while a forward runs that will be recorded or compiled: the window's K and V go to
        these slots of the rows, int64 [B, T], and the layers tell the model FAR in place of the
        length, which changes; a model that computes with it gives other logits.
    """

    def __init__(self, model: PreTrainedModel, kv: RaggedKV, prompt_lens: list[int]):
        originals = cache_layers(model)
        names = [type(layer).__name__ for layer in originals]
        layers = [
            RaggedLayer(self, i) if name in ROLLBACK_LAYERS else originals[i]
            for i, name in enumerate(names)
        ]
        super().__init__(layers=layers)
        self.sliding = frozenset(i for i, name in enumerate(names) if "Sliding" in name)
        self.kv = kv
        self.prompt_lens = prompt_lens
        self.prefilling = True
        self.places: Tensor | None = None
        kv.reserve(max(prompt_lens))

    def end_prefill(self) -> None:
        self.prefilling = False
        self.kv.set_lens(self.prompt_lens)


def cache_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of the cache that transformers itself would make for this model."""
    layers = DynamicCache(config=model.config).layers
    if layers:
        return layers
    text = model.config.get_text_config()
    plain = DynamicCache()
    probe = torch.zeros(1, 1, 1, 1)
    plain.update(probe, probe, 0)
    return [plain.layers[0]] * text.num_hidden_layers
