"""What drafts cost in memory: weights against the tokens whose K and V they displace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

CONVERSATION = 4096
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt")


class KvSize(NamedTuple):
    """Bytes of K and V of one token, in layers that see everything and in those with a window.

    window: positions that the latter see. layout: how they were counted.
    """

    growing: int
    windowed: int
    window: int
    layout: str

    @property
    def per_token(self) -> int:
        return self.growing + self.windowed

    def of(self, tokens: int) -> int:
        """Bytes of a conversation of so many tokens."""
        kept = min(tokens, self.window) if self.windowed else 0
        return self.growing * tokens + self.windowed * kept


def kv_size(config: Mapping[str, Any], dtype: str | None = None) -> KvSize:
    """From a model's config.json; `dtype` (a torch name) instead of the model's own.

    Latent attention (MLA) counts the compressed latent and the rotary key, which is what serving
    engines keep; transformers keeps every head expanded.

    Raises:
        ValueError: the config does not say enough, or the dtype is unknown.
    """
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    name = str(dtype or text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"expected a dtype of {', '.join(DTYPE_BYTES)}, got {name!r}")
    layers = _first(text, "num_hidden_layers", "n_layer", "num_layers")
    kinds = text.get("layer_types") or ["full_attention"] * layers
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    growing = sum("attention" in kind and "linear" not in kind for kind in kinds) - windowed
    window = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
    if windowed and not window:
        growing, windowed = growing + windowed, 0
    numbers, layout = _numbers_per_layer(text)
    one = numbers * DTYPE_BYTES[name]
    return KvSize(growing * one, windowed * one, window, f"{layout}, {name}")


def _numbers_per_layer(text: Mapping[str, Any]) -> tuple[int, str]:
    if text.get("kv_lora_rank"):
        rank, rope = int(text["kv_lora_rank"]), int(text.get("qk_rope_head_dim") or 0)
        return rank + rope, f"latent {rank} + {rope}"
    heads = _first(text, "num_attention_heads", "n_head")
    kv_heads = int(text.get("num_key_value_heads") or (1 if text.get("multi_query") else heads))
    size = text.get("head_dim") or _first(text, "hidden_size", "n_embd", "d_model") // heads
    return 2 * kv_heads * int(size), f"{kv_heads} KV heads of {size}"


def _first(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if text.get(name) is not None:
            return int(text[name])
    raise ValueError(f"expected {' or '.join(names)} in config.json, got none")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises ValueError with the reason."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected an object in {folder / 'config.json'}")
    return config


def weight_bytes(path: Path) -> int:
    """Of a weights file, or of those in a checkpoint folder: the first format found."""
    if path.is_file():
        return path.stat().st_size
    for pattern in WEIGHT_FILES:
        sizes = [file.stat().st_size for file in sorted(path.glob(pattern))]
        if sizes:
            return sum(sizes)
    raise ValueError(f"no weights in {path}: expected {' or '.join(WEIGHT_FILES)}")


def displaced(draft_bytes: int, target: KvSize) -> dict[str, float]:
    """What the draft's weights displace: tokens of the target's cache and whole conversations."""
    return {
        "draft_bytes": draft_bytes,
        "kv_bytes_per_token": target.per_token,
        "tokens_lost": draft_bytes / target.per_token,
        "conversation_tokens": CONVERSATION,
        "conversations_lost": draft_bytes / target.of(CONVERSATION),
    }
