"""tree_attention under transformers' attention interface, for our verify forwards only.

While a verify forward runs, the model's configs name our implementation. A forward of another
thread that meets the name in that time has no window of its own and is handed to the original one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_kernels.ops.tree_attention import tree_attention
from specdec_kernels.tree import DraftTree

NAME = "specdec"

# Keyword arguments that may reach an attention function without changing what it computes here.
HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class UnsupportedModelError(RuntimeError):
    """The model asks its attention for something that a verify forward cannot give."""


class Window:
    """What the attention function needs to know about the verify forward that is running.

    sliding: indices of the layers whose cache is that of a sliding window.
    split_size: keys per split of the cache; 0 lets the kernel choose by the window's size.
    """

    def __init__(
        self,
        tree: DraftTree,
        prefix_len: Tensor,
        sliding: frozenset[int] = frozenset(),
        split_size: int = 0,
    ):
        self.split_size = split_size
        self.tree = tree
        self.prefix_len = prefix_len
        self.sliding = sliding
        self.calls = 0


_active = threading.local()


def current_window() -> Window | None:
    return getattr(_active, "window", None)


class Flip:
    """Switches a model's attention implementation, counted, so that overlapping forwards agree.

    The count is kept per config: models may share one, and a model may be patched again meanwhile.
    """

    def __init__(self, model: PreTrainedModel):
        modules = (m for m in model.modules() if isinstance(m, PreTrainedModel))
        self._configs = list({id(m.config): m.config for m in modules}.values())

    @contextlib.contextmanager
    def verify(self, window: Window) -> Iterator[None]:
        """Inside, this thread's forwards of the model attend through `window`."""
        self._enter()
        _active.window = window
        try:
            yield
        finally:
            _active.window = None
            self._leave()

    def _enter(self) -> None:
        with _flip_lock:
            for config in self._configs:
                users = _users.get(id(config), 0)
                if users == 0:
                    _original_of[id(config)] = config._attn_implementation
                    config._attn_implementation_internal = NAME
                _users[id(config)] = users + 1

    def _leave(self) -> None:
        with _flip_lock:
            for config in self._configs:
                _users[id(config)] -= 1
                if _users[id(config)] == 0:
                    config._attn_implementation_internal = _original_of[id(config)]
                    del _users[id(config)]


_flip_lock = threading.Lock()
_users: dict[int, int] = {}  # by id of the config: verify forwards that run on it
_original_of: dict[int, str] = {}  # by id of the config, kept for forwards that overlap the end


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, K, D] of the window's last slots, key and value [B, Hkv, S, D] of the cache."""
    window = current_window()
    if window is None:
        original = _original_attention(module)
        return original(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            softcap=softcap,
            sliding_window=sliding_window,
            s_aux=s_aux,
            **kwargs,
        )
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention"
        )
    if not sliding_window and getattr(module, "layer_idx", None) in window.sliding:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not tell its attention about the sliding window"
        )
    window.calls += 1
    tree = window.tree
    before = tree.width - query.shape[2]  # slots that were read before and ask nothing now
    out, _ = tree_attention(
        pad(query, (0, 0, before, 0)).transpose(1, 2) if before else query.transpose(1, 2),
        key,
        value,
        window.prefix_len,
        tree.num_nodes,
        tree.tree_mask,
        tree.depth,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window if sliding_window else None,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        split_size=window.split_size,
    )
    return out[:, before:], None


def _original_attention(module: nn.Module) -> Callable:
    name = _original_of.get(id(module.config), "sdpa")
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def mask(*args: Any, **kwargs: Any) -> Any:
    """Our attention function masks by the tree itself; other forwards get the original's mask."""
    if current_window() is not None:
        return None
    name = _original_of.get(id(kwargs.get("config")), "sdpa")
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
