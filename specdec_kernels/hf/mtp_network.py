"""MTP layers as a network: each is a model of the target's class with a single layer.

Whatever the family does in a layer (experts, latent attention, gates, norms of queries and keys,
rotary embeddings) is so its own code; what lies before the layer is the same in all families.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from specdec_kernels.cache import RaggedKV
from specdec_kernels.drafting.mtp import Slots
from specdec_kernels.hf.attention import Flip, UnsupportedModelError, Window
from specdec_kernels.hf.cache import RaggedCache
from specdec_kernels.hf.support import cache_argument

Model = type[PreTrainedModel]


class MtpLayer(nn.Module):
    """Joins token and hidden state, then runs one decoder layer and the final norm behind it.

    hidden_first: the hidden state stands before the token in what `proj` reads.
    """

    def __init__(self, model: PreTrainedModel, bias: bool, hidden_first: bool):
        super().__init__()
        size = model.config.hidden_size
        self.model, self.hidden_first = model, hidden_first
        self.token_norm, self.hidden_norm = copy.deepcopy(model.norm), copy.deepcopy(model.norm)
        self.proj = nn.Linear(2 * size, size, bias=bias, device="meta")
        self.flip = Flip(model)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        token, state = self.token_norm(embedded), self.hidden_norm(hidden)
        return self.proj(torch.cat([state, token] if self.hidden_first else [token, state], -1))


class MtpLayerRun:
    """A layer with its K/V in one run."""

    def __init__(self, layer: MtpLayer, kv: RaggedKV):
        self.layer, self.kv = layer, kv
        self.cache = RaggedCache(layer.model, kv, [0] * kv.batch)
        self.cache.end_prefill()
        self.options = {
            cache_argument(layer.model): self.cache,
            "use_cache": True,
            "return_dict": True,
        }

    def read(self, embedded: Tensor, hidden: Tensor, slots: Slots) -> Tensor:
        model, window = self.layer.model, Window(slots.tree, slots.prefix_len, self.cache.sliding)
        inputs: dict[str, Any] = {
            "inputs_embeds": self.layer.joined(embedded, hidden),
            "position_ids": slots.positions.long(),
            **self.options,
        }
        if not hasattr(GenerationMixin, "_prefill"):
            width = embedded.shape[1]
            inputs["cache_position"] = max(self.kv.lens) + torch.arange(width, device=hidden.device)
        with self.layer.flip.verify(window):
            out = model(**inputs).last_hidden_state
        if window.calls == 0:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not use the attention interface"
            )
        return out


class MtpHead(nn.Module):
    """All MTP layers between the target's embeddings and its lm_head; without its weights.

    states: id of the hidden states of the target that layer 0 reads.
    """

    target_ids = None

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        names: Container[str],
        *,
        states: int,
        hidden_first: bool,
        vocab_size: int,
        max_positions: int | None,
    ):
        super().__init__()
        size = models[0].config.hidden_size
        self.hidden_layers, self.hidden_first = (states,), hidden_first
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.num_layers = len(models)
        self.carried, self.least_text = len(models) * size, len(models)
        layers = [
            MtpLayer(model, f"layers.{i}.proj.bias" in names, hidden_first)
            for i, model in enumerate(models)
        ]
        self.layers: Any = nn.ModuleList(layers)
        self.embed_tokens = nn.Embedding(vocab_size, size, device="meta")
        self.lm_head = nn.Linear(size, vocab_size, bias="lm_head.bias" in names, device="meta")

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def open(self, kvs: Sequence[RaggedKV]) -> list[MtpLayerRun]:
        return [MtpLayerRun(layer, kv) for layer, kv in zip(self.layers, kvs, strict=True)]


def single_layer(kind: Model, config: PretrainedConfig, names: Collection[str]) -> PreTrainedModel:
    """A model of one layer, whose parameters are still on the meta device.

    names: of the layer's weights: they tell experts from a dense MLP, and MiMo-V2's sliding layers.
    """
    with torch.device("meta"):
        model = kind._from_config(_of_one_layer(config, names))
    if not isinstance(getattr(model, "norm", None), nn.Module) or not hasattr(model, "layers"):
        raise ValueError(f"model: {kind.__name__} has no layers and norm to make an MTP layer of")
    model.embed_tokens = nn.Identity()
    return model.eval()


def finish(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the modules again that computed buffers on the meta device: rotary embeddings."""
    for name, module in list(model.named_modules()):
        if any(b is not None and b.is_meta for b in module._buffers.values()):
            owner = model.get_submodule(name.rpartition(".")[0])
            made: Any = type(module)
            setattr(owner, name.rpartition(".")[2], made(config=model.config).to(device))


def _of_one_layer(config: PretrainedConfig, names: Collection[str]) -> PretrainedConfig:
    values, layers = config.to_dict(), config.num_hidden_layers
    sparse, sinks = (any(part in n for n in names) for part in ("mlp.experts.", "self_attn.sinks"))
    kind = "sliding_attention" if sinks else "full_attention"
    fitting = [i for i, found in enumerate(values.get("layer_types") or []) if found == kind]
    chosen = fitting[-1] if fitting else 0
    for key, value in values.items():
        if isinstance(value, list) and len(value) == layers:
            values[key] = value[chosen : chosen + 1]
    values["num_hidden_layers"] = 1
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] = ["sparse" if sparse else "dense"]
    if "first_k_dense_replace" in values:
        values["first_k_dense_replace"] = 0 if sparse else 1
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = [] if sparse else [0]
    return type(config).from_dict(values)
