"""What can be accelerated, and the reason when something cannot."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specdec_kernels.dispatch import asked_for, default_on, why_unavailable
from specdec_kernels.hf.cache import ROLLBACK_LAYERS, cache_layers

ROW_WISE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

# Arguments of generate that a verify forward needs not repeat; any other is an input of the model.
KNOWN_OPTIONS = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_position",
        "inputs_embeds",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "return_dict",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "use_cache",
    }
)

# Positions or masks of these come from the cache's length or from attention biases of their own.
NOT_POSITION_SAFE = ("llama4", "llama4_text", "bloom", "mpt", "falcon", "gpt_neo", "minimax")


class Support(NamedTuple):
    """ok: whether `generate` of the model is accelerated; reason: why not."""

    ok: bool
    reason: str = ""


def support(model: Any) -> Support:
    """Whether `patch` accelerates this model, and if not, why."""
    reason = _why_not(unwrap(model))
    return Support(reason is None, reason or "")


def unwrap(model: Any) -> Any:
    """The model whose `_sample` runs: PEFT wrappers forward to their base model."""
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5 renamed the forward argument past_key_values to cache."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _why_not(model: Any) -> str | None:
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        return f"expected a transformers causal language model, got {type(model).__name__}"
    config = model.config
    if config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if not model.can_generate():
        return f"{type(model).__name__} has no language model head"
    if type(model)._sample is not GenerationMixin._sample:
        return f"{type(model).__name__} has a decoding loop of its own"
    text = config.get_text_config()
    if text.model_type in NOT_POSITION_SAFE:
        return f"{text.model_type} derives positions or masks from the cache length"
    if not _uses_attention_interface(model):
        return f"{type(model).__name__} does not use transformers' attention interface"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    if _is_recurrent(model, text):
        return f"{text.model_type} layers keep a recurrent state that cannot be rolled back"
    reason = rope_reason(text)
    if reason is not None:
        return reason
    for layer in cache_layers(model):
        name = type(layer).__name__
        if name not in (*ROLLBACK_LAYERS, "DummyLayer"):
            return f"its cache layers of type {name} cannot be rolled back per row"
    return _device_reason(model)


def _uses_attention_interface(model: PreTrainedModel) -> bool:
    return any(
        "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(m).__module__])
        for m in model.modules()
        if isinstance(m, PreTrainedModel)
    )


def _is_recurrent(model: PreTrainedModel, text: Any) -> bool:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return bool(getattr(model, "_is_stateful", False)) or any(
        not isinstance(kind, str) or "attention" not in kind or "linear" in kind for kind in kinds
    )


def rope_reason(text: Any) -> str | None:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for entry in kinds:
        kind = entry.get("rope_type", entry.get("type"))
        if kind in ("dynamic", "longrope"):
            return f"{kind} rotary embeddings change with the sequence length"
        if entry.get("mrope_section"):
            return "multi-dimensional rotary positions are not supported"
    return None


def _device_reason(model: PreTrainedModel) -> str | None:
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        return "models split over several devices are not supported"
    device = devices.pop() if devices else torch.device("cpu")
    forced = asked_for()
    if device.type == "cpu" or (forced and why_unavailable(forced, device.type) is None):
        return None
    if device.type != "cuda":
        return f"there are no kernels for {device.type} tensors in this version"
    if default_on("tree_attention", device) == "reference":
        return (
            "no kernels have been proven on this GPU; `python -m bench --device cuda --suite` "
            "does that, or name a backend in SPECDEC_BACKEND"
        )
    return None


def why_plain(
    model: PreTrainedModel,
    method: str,
    input_ids: torch.Tensor,
    processors: list[Any],
    unsafe_processors: list[str],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    options: dict[str, Any],
) -> str | None:
    """Why this call of `generate` has to run plain, or None."""
    if method == "_beam_search":
        return "beam search"
    if method == "_assisted_decoding":
        return "transformers' own assisted generation was asked for"
    batch = input_ids.shape[0]
    cache = options.get(cache_argument(model))
    other_criteria = [type(c).__name__ for c in criteria if type(c) not in ROW_WISE_CRITERIA]
    pads_rows = any(hasattr(c, "eos_token_id") for c in criteria)
    stops_rows = any(isinstance(c, StopStringCriteria) for c in criteria)
    given = {k for k, v in options.items() if v is not None and v is not False}
    inputs = sorted(given - KNOWN_OPTIONS)
    checks = [
        (options.get("synced_gpus"), "synced_gpus"),
        (not options.get("use_cache", True), "use_cache=False"),
        (
            config.cache_implementation not in (None, "dynamic"),
            f"cache_implementation={config.cache_implementation!r}",
        ),
        (
            cache is None
            or type(cache) is not DynamicCache
            or cache.get_seq_length() > 0
            or getattr(cache, "_is_user_defined", False),
            "a cache of the caller's own",
        ),
        (config.output_attentions, "output_attentions"),
        (config.output_hidden_states, "output_hidden_states"),
        (options.get("inputs_embeds") is not None, "inputs_embeds"),
        (inputs, f"further inputs of the model: {', '.join(inputs)}"),
        (getattr(config, "prefill_chunk_size", None), "chunked prefill"),
        (getattr(config, "token_healing", False), "token healing"),
        (options.get("streamer") is not None and batch > 1, "a streamer with more than one row"),
        (not _is_left_padded(options.get("attention_mask")), "a prompt that is not left-padded"),
        (not _is_counted(input_ids, options), "position_ids that do not count the tokens from 0"),
        (
            batch > 1 and other_criteria,
            f"stopping criteria that may look at the whole batch: {', '.join(other_criteria)}",
        ),
        (
            batch > 1 and stops_rows and not pads_rows,
            "stop strings with several rows and no EOS token: rows that stopped would go on",
        ),
        (
            batch > 1 and unsafe_processors,
            "logits processors that may keep state across rows: " + ", ".join(unsafe_processors),
        ),
        (model.training, "the model is in training mode"),
    ]
    return next((reason for condition, reason in checks if condition), None)


def _is_left_padded(mask: torch.Tensor | None) -> bool:
    if mask is None:
        return True
    if mask.dim() != 2:
        return False
    kept = mask != 0
    return bool((kept[:, 1:] >= kept[:, :-1]).all())


def _is_counted(input_ids: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether position_ids are those that generate makes itself.

    Under transformers 4 no given ones are: plain generate does not advance them.
    """
    given, mask = options.get("position_ids"), options.get("attention_mask")
    if given is None:
        return True
    if not hasattr(GenerationMixin, "_prefill") or given.shape[1:] != input_ids.shape[1:]:
        return False
    kept = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    return bool(((given == kept.cumsum(1) - 1) | (kept == 0)).all())
