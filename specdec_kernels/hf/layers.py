"""Layers of the model through our kernels while verify forwards run, and which of them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from specdec_kernels.dispatch import quickest
from specdec_kernels.hf.forwards import (
    INVARIANT,
    MAX_ROWS,
    OTHER,
    PREFILL,
    Forward,
    Replaced,
    active,
    installed,
    lock,
    may_replace,
)
from specdec_kernels.hf.invariant import RowWise, Survey, by_rows, is_elementwise
from specdec_kernels.hf.linear import Conv1DForward, linear_forwards
from specdec_kernels.hf.norm import norm_forwards
from specdec_kernels.ops.linear_small_m import linear_small_m
from specdec_kernels.ops.rms_norm import rms_norm

Treated = dict[nn.Module, Forward]


class _Held(threading.local):
    flips: tuple[LayerFlip, ...] = ()


_held = _Held()


class LayerFlip:
    """Gives linear layers and RMS norms a `forward` of ours while verify forwards run.

    invariant: all eligible linear layers, whatever is faster, and also the modules that `treat` was
        told of.
    """

    def __init__(self, model: nn.Module, *, invariant: bool = False):
        self.invariant = invariant
        self._modules: Replaced | None = None
        self._treated: Treated = {}
        self._model = weakref.ref(model)

    def verify(self, rows: int) -> contextlib.AbstractContextManager[None]:
        if self.invariant:
            return self._flipped(INVARIANT)
        return self._flipped(rows if rows <= MAX_ROWS else OTHER)

    def prefill(self) -> contextlib.AbstractContextManager[None]:
        return self._flipped(PREFILL)

    def treat(self, survey: Survey) -> list[str]:
        """Takes the uneven modules of a forward in hand; what cannot be helped, for a warning."""
        model = self._model()
        names = {} if model is None else {m: name for name, m in model.named_modules()}
        hopeless = []
        for module, operations, uneven in survey.uneven():
            if module in self._treated:
                continue
            shown = f"{names.get(module) or 'the model'} ({type(module).__name__})"
            if "unknown" in uneven:
                hopeless.append(f"{shown} runs {', '.join(sorted(uneven['unknown']))}")
            elif module is None or module is model or not _may_treat(module):
                products = sorted(set().union(*uneven.values()))
                hopeless.append(f"{shown} keeps its own forward, with {', '.join(products)}")
            else:
                self._treated = {**self._treated, **_treatment(model, module, operations)}
        return hopeless

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Leaves the modules flipped, but idle, between this thread's forwards: there are many."""
        with installed(self._layers()):
            outer = _held.flips
            _held.flips = (*outer, self)
            try:
                yield
            finally:
                _held.flips = outer

    @contextlib.contextmanager
    def _flipped(self, kind: int) -> Iterator[None]:
        layers = self._layers()
        if kind == PREFILL:
            for _, forward in layers:
                if isinstance(forward, Conv1DForward):
                    forward.forget()
        replaced = [*([] if self in _held.flips else layers), *self._treated.items()]
        with installed(replaced):
            active.linear, active.norm = quickest(linear_small_m), quickest(rms_norm)
            active.kind = kind
            try:
                yield
            finally:
                active.kind = OTHER

    def _layers(self) -> Replaced:
        with lock:
            model = self._model()
            if self._modules is None and model is not None:
                self._modules = [*linear_forwards(model, self.invariant), *norm_forwards(model)]
            return self._modules or []


class OwnLayers:
    """The layers of a drafting network, which need no invariance.

    linear: as in SpeculativeConfig.
    """

    def __init__(self, network: nn.Module, linear: str):
        self.layers = None if linear == "off" else LayerFlip(network)

    def around(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """For a forward over that many slots."""
        if self.layers is None:
            return contextlib.nullcontext()
        return self.layers.verify(rows) if rows <= MAX_ROWS else self.layers.prefill()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Around many calls of this thread."""
        return contextlib.nullcontext() if self.layers is None else self.layers.hold()


def _treatment(model: nn.Module | None, module: nn.Module, operations: set[str]) -> Treated:
    """For a module and all of its class: which experts a forward runs depends on its tokens."""
    alike = [] if model is None else [m for m in model.modules() if type(m) is type(module)]
    return {
        m: _invariant_forward(m, is_elementwise(m, operations))
        for m in (module, *alike)
        if may_replace(m)
    }


def _invariant_forward(module: nn.Module, elementwise: bool) -> Forward:
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if active.kind != INVARIANT:
            return original(module, *args, **kwargs)
        if elementwise and len(args) == 1 and not kwargs:
            return by_rows(functools.partial(original, module), args[0])
        with RowWise():
            return original(module, *args, **kwargs)

    return forward


def _may_treat(module: nn.Module) -> bool:
    """Not a linear layer that was not eligible, nor a forward that others put on the instance."""
    return not isinstance(module, nn.Linear) and may_replace(module)
