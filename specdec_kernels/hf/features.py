"""Hidden states of a model, caught while its forwards run, for drafters that read them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_kernels.hf.attention import UnsupportedModelError

BEFORE_NORM = -(10**6)  # far from what a wrong config may ask for


class _Here(threading.local):
    """Where the forward that this thread runs leaves its hidden states."""

    found: dict[int, Tensor] | None = None


_here = _Here()


class FeatureTap:
    """Catches the hidden states `layers` of the forwards that this thread runs in `caught`.

    layers: ids as transformers' `hidden_states` counts: k below the number of layers is what layer
        k reads, 0 the embeddings; the number of layers is the last one's output after the final
        norm, BEFORE_NORM the same before it. The model's own collecting would keep all of them.

    Raises:
        ValueError: for an id that the model does not have.
        UnsupportedModelError: for a model whose layers do not stand in one list.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._decoder = decoder_of(model) if layers else model
        self._size = model.config.get_text_config().hidden_size
        self._blocks = _blocks(self._decoder, model) if layers else nn.ModuleList()
        for k in self.layers:
            if k != BEFORE_NORM and not 0 <= k <= len(self._blocks):
                raise ValueError(
                    f"hidden layers: expected ids from 0 to {len(self._blocks)} for "
                    f"{type(model).__name__}, got {k}"
                )
        self._hooks = [self._hook_of(k) for k in self.layers]

    @contextlib.contextmanager
    def caught(self) -> Iterator[dict[int, Tensor]]:
        """Maps id to [B, T, d] once the forward inside has run; of several, the last one counts."""
        found: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            for module, hook, is_before in self._hooks:
                if is_before:
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(hook)
                stack.callback(handle.remove)
            _here.found = found
            try:
                yield found
            finally:
                _here.found = None

    def _hook_of(self, k: int) -> tuple[nn.Module, Callable[..., None], bool]:
        """Module, hook, and whether it runs before the module. The same functions for every
        forward: others would have it compiled anew.
        """

        def before(module: nn.Module, args: tuple, options: dict[str, Any]) -> None:
            if _here.found is not None:
                _here.found[k] = args[0] if args else options["hidden_states"]

        def behind(module: nn.Module, args: tuple, output: Any) -> None:
            if _here.found is not None:
                _here.found[k] = output[0] if isinstance(output, tuple) else output

        def at_the_end(module: nn.Module, args: tuple, output: Any) -> None:
            if _here.found is not None:
                _here.found[k] = output[0]

        if k == BEFORE_NORM:
            return self._blocks[-1], behind, False
        if k < len(self._blocks):
            return self._blocks[k], before, True
        return self._decoder, at_the_end, False

    def joined(self, found: dict[int, Tensor]) -> Tensor | None:
        """What was caught, side by side in the order of `layers`: [B, T, L * d]."""
        if not self.layers:
            return None
        states = [found.get(k) for k in self.layers]
        for k, state in zip(self.layers, states, strict=True):
            if state is None or state.dim() != 3 or state.shape[2] != self._size:
                shape = None if state is None else list(state.shape)
                raise UnsupportedModelError(
                    f"{type(self._decoder).__name__} gave no hidden state {k} of size "
                    f"{self._size}: got {shape}"
                )
        return torch.cat([state for state in states if state is not None], 2)


def compacted(features: Tensor, lens: Sequence[int]) -> Tensor:
    """Of left-padded rows [B, S, n]: each row's last lens[b] at the front, zeros behind."""
    out = torch.zeros_like(features[:, : max(lens)])
    for b, length in enumerate(lens):
        out[b, :length] = features[b, features.shape[1] - length :]
    return out


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The module whose output ends with the final norm."""
    decoder = model.get_decoder()
    # Under transformers 4 some models name themselves.
    return model.base_model if decoder is model else decoder


def _blocks(decoder: nn.Module, model: PreTrainedModel) -> nn.ModuleList:
    number = model.config.get_text_config().num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} does not keep its {number} layers in one list"
    )
