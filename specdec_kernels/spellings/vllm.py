"""vLLM's --speculative-config, as of vLLM 0.33.

The same keys are those of `patch`; `read` adds what `patch` does not share, vLLM's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_kernels.spellings.reading import (
    Reading,
    harmless,
    mapped,
    refused,
    switch,
    unknown,
)

SERVING = "a detail of serving"
DRAFT_MODEL = "how the drafter is run cannot change what is generated"
INTERNAL = "vLLM fills it in itself"
NOT_SAMPLED = "the output would not be the model's"
LOSSY = "it is lossy: the output would not have the model's distribution"
DSPARK = "it belongs to method 'dspark'"

KEYS = {
    "method": mapped("method"),
    "model": mapped("model"),
    "num_speculative_tokens": mapped("num_speculative_tokens"),
    "num_speculative_tokens_per_batch_size": mapped("num_speculative_tokens_per_batch_size"),
    "prompt_lookup_min": mapped("prompt_lookup_min"),
    "prompt_lookup_max": mapped("prompt_lookup_max"),
    "suffix_decoding_max_tree_depth": mapped("suffix_decoding_max_tree_depth", 24),
    "suffix_decoding_max_cached_requests": mapped("suffix_decoding_max_cached_requests", 10000),
    "suffix_decoding_max_spec_factor": mapped("suffix_decoding_max_spec_factor", 1.0),
    "suffix_decoding_min_token_prob": mapped("suffix_decoding_min_token_prob", 0.1),
    "rejection_sample_method": mapped("rule"),
    "draft_sample_method": mapped("draft_sample_method", "greedy"),
    "draft_tensor_parallel_size": harmless(SERVING),
    "disable_padded_drafter_batch": harmless(SERVING, False),
    "disable_eagle_block_drop": harmless(SERVING, False),
    "disable_lookahead_block_hashes": harmless(SERVING, False),
    "use_local_argmax_reduction": harmless(SERVING, False),
    "enforce_eager": harmless(SERVING),
    "quantization": harmless(DRAFT_MODEL),
    "moe_backend": harmless(DRAFT_MODEL),
    "attention_backend": harmless(DRAFT_MODEL),
    "kv_cache_dtype": harmless(DRAFT_MODEL),
    "max_model_len": harmless(DRAFT_MODEL),
    "draft_load_config": harmless(DRAFT_MODEL),
    "draft_lm_head_quantization": harmless(DRAFT_MODEL),
    "index_share_for_mtp_iteration": harmless(DRAFT_MODEL),
    "revision": refused("give the folder of that revision as model"),
    "code_revision": refused("give the folder of that revision as model"),
    "tensor_parallel_size": refused("vLLM spells it draft_tensor_parallel_size"),
    "use_heterogeneous_vocab": mapped("draft_translation", False, switch),
    "parallel_drafting": refused("drafters that draft in parallel (PARD) are not here", False),
    "synthetic_acceptance_rates": refused(NOT_SAMPLED),
    "synthetic_acceptance_length": refused(NOT_SAMPLED),
    "fly_window_size": refused(LOSSY),
    "fly_entropy_threshold": refused(LOSSY, 0.3),
    "fly_entropy_top_k": refused(LOSSY, 3),
    "enable_adaptive_verification": refused(DSPARK, False),
    "dspark_draft_topk": refused(DSPARK),
    "xpress_topc": refused("it belongs to method 'xpress'"),
    "target_model_config": refused(INTERNAL),
    "target_parallel_config": refused(INTERNAL),
    "draft_model_config": refused(INTERNAL),
    "draft_parallel_config": refused(INTERNAL),
}

# "standard" asks for the exact distribution, which `auto` gives.
RULES = {"standard": "auto", "block": "block"}
REFUSED_RULES = {"synthetic": NOT_SAMPLED, "fly": LOSSY}

ALIASES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
MARKERS = ("ngram", "[ngram]", "ngram_gpu", "suffix")  # as `model`, they name no model
NAMED = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))

LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
DEPTH = "suffix_decoding_max_tree_depth"
NEEDS_NUMBER = ("ngram", "draft_model")
DEFAULTS: dict[str, Any] = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
    "draft_sample_method": "greedy",
    # vLLM drafts chains only.
    "prompt_lookup_matches": 1,
    "suffix_decoding_tree": False,
    "draft_tree_topk": 1,
}


def read(config: str | Mapping[str, Any], fields: Sequence[str]) -> Reading:
    """vLLM's JSON text, or what it says as a dictionary, with vLLM's defaults.

    Options named in `fields` that vLLM lacks may stand among its own. vLLM finds a method that is
    not given by the name of the model, as here, and then by the checkpoint's config.json, which
    stays closed here: Medusa and MTP checkpoints need their method.

    Raises:
        ValueError: no JSON object, an unknown or refused key, or what vLLM refuses: neither method
            nor model, no num_speculative_tokens for the methods of NEEDS_NUMBER.
        TypeError: `config` is neither text nor a dictionary.
    """
    given = {k: v for k, v in _json_object(config).items() if v is not None}
    reading = Reading("from_vllm")
    _translate(given, fields, reading)
    _find_method(reading)
    settings = reading.settings
    if "method" not in settings:
        raise ValueError("from_vllm: expected a method or a model, got neither")
    reading.defaults = dict(DEFAULTS)
    lookup = [settings[name] for name in LOOKUP if name in settings] or [5]
    if settings["method"] == "ngram":
        reading.defaults |= dict.fromkeys(LOOKUP, lookup[0])
    elif settings["method"] == "suffix":
        reading.defaults["num_speculative_tokens"] = settings.get(DEPTH, DEFAULTS[DEPTH])
    if settings["method"] in NEEDS_NUMBER and "num_speculative_tokens" not in settings:
        raise ValueError(
            f"from_vllm: expected num_speculative_tokens with method {settings['method']!r}, "
            "got none"
        )
    return reading


def read_plain(
    config: Mapping[str, Any], options: Mapping[str, Any], fields: Sequence[str]
) -> Reading:
    """What `patch` takes: vLLM's keys and those of `fields`, without vLLM's defaults.

    `options` win over `config`. Without a method, `model` decides, and without a model nothing is
    said about it.
    """
    reading, over = Reading("patch"), Reading("patch")
    _translate(config, fields, reading)
    _translate(options, fields, over)
    reading.settings |= over.settings
    reading.idle += over.idle
    _find_method(reading)
    return reading


def _translate(given: Mapping[str, Any], fields: Sequence[str], reading: Reading) -> None:
    foreign: dict[str, Any] = {}
    for key, value in given.items():
        if key in fields and not (value is None and key in ("method", *LOOKUP)):
            reading.settings[key] = value
        elif key in KEYS:
            foreign[key] = value
        else:
            raise unknown(reading.who, key, (*fields, *KEYS))
    values = reading.sort(KEYS, foreign)
    rule = values.pop("rejection_sample_method", None)
    if rule is not None:
        reading.set("rule", _rule(rule, reading.who), "rejection_sample_method")
    if values.pop("use_heterogeneous_vocab", False):
        reading.set("draft_translation", "intersection", "use_heterogeneous_vocab")
    reading.settings |= values


def _rule(method: Any, who: str) -> str:
    if isinstance(method, str) and method in REFUSED_RULES:
        why = REFUSED_RULES[method]
        raise ValueError(f"{who}: rejection_sample_method={method!r} is refused: {why}")
    if not isinstance(method, str) or method not in RULES:
        raise ValueError(
            f"{who}: rejection_sample_method: expected one of {', '.join(RULES)}, got {method!r}"
        )
    return RULES[method]


def _find_method(reading: Reading) -> None:
    """vLLM's names for our methods, and the method that the name of the model implies."""
    settings = reading.settings
    model, method = settings.get("model"), settings.get("method")
    if isinstance(method, str):
        method = "mtp" if method.endswith("_mtp") else ALIASES.get(method, method)
    elif method is None and model is not None:
        method = _method_of(model)
    if method is not None:
        settings["method"] = method
    if isinstance(model, str) and model in MARKERS:
        del settings["model"]


def _method_of(model: Any) -> str:
    if not isinstance(model, str):
        return "draft_model"
    if model in MARKERS:
        return ALIASES.get(model, model)
    parts = model.split(".")
    if len(parts) > 1 and all(part.isidentifier() for part in parts):
        return "custom_class"
    found = [method for part, method in NAMED if part in model.lower()]
    return found[0] if found else "draft_model"


def _json_object(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str):
        text = config
        try:
            config = json.loads(text)
        except ValueError as error:
            example = '{"method": "ngram", "num_speculative_tokens": 5}'
            raise ValueError(
                f"from_vllm: expected JSON text such as {example}, got {text!r}: {error}"
            ) from None
        if not isinstance(config, dict):
            raise ValueError(f"from_vllm: expected a JSON object, got {text!r}")
    if not isinstance(config, Mapping):
        raise TypeError(
            f"from_vllm: expected JSON text or a dictionary, got {type(config).__name__}"
        )
    return config
