"""Forwards of ours on modules of the model, while this thread runs a forward that we asked for.

Other threads that run a module meanwhile get the module's own forward. Several flips may hold the
same module: they are counted, whoever made them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from specdec_kernels.ops.linear_small_m import linear_small_m
from specdec_kernels.ops.rms_norm import rms_norm

MAX_ROWS = 64

# What kind of forward this thread runs: a verify forward of 1..MAX_ROWS rows, or one of these.
OTHER, PREFILL, INVARIANT = 0, MAX_ROWS + 1, MAX_ROWS + 2

Forward = Callable[..., Any]
Replaced = list[tuple[nn.Module, Forward]]


class _Active(threading.local):
    kind: int = OTHER
    linear: Callable[..., Any] = staticmethod(linear_small_m)
    norm: Callable[..., Any] = staticmethod(rms_norm)


active = _Active()
lock = threading.Lock()
_users: dict[int, int] = {}  # by id of the module: forwards that run through our flip


@contextlib.contextmanager
def installed(replaced: Replaced) -> Iterator[None]:
    with lock:
        for module, forward in replaced:
            if id(module) not in _users:
                module.__dict__["forward"] = forward
            _users[id(module)] = _users.get(id(module), 0) + 1
    try:
        yield
    finally:
        with lock:
            for module, _ in replaced:
                _users[id(module)] -= 1
                if _users[id(module)] == 0:
                    del _users[id(module)], module.__dict__["forward"]


def may_replace(module: nn.Module) -> bool:
    """Not a forward that others put on the instance, as hooks of accelerate do."""
    return "forward" not in module.__dict__ or id(module) in _users
