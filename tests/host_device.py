"""A CPU in place of the GPU that the suite of bench/ runs on."""

from __future__ import annotations

import contextlib
import time

import torch
from torch import Tensor

from bench.harness import copy_of

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "nonzero")


class HostGraph:
    """A recording is the call itself, run again into the same outputs."""

    def __init__(self, call):
        call()
        self.call, self.outputs = call, call()

    def replay(self):
        assign(self.outputs, self.call())
        return self.outputs


class HostDevice:
    capability = (9, 0)

    def __init__(self, name="cpu"):
        self.device = torch.device(name)

    def facts(self):
        return {"device": "no GPU", "driver": "1.2", "torch": torch.__version__, "date": "today"}

    def cache_bytes(self):
        return 1 << 10

    def move(self, value):
        return copy_of(value)

    def capture(self, call):
        return HostGraph(call)

    @contextlib.contextmanager
    def no_sync(self):
        originals = {name: getattr(Tensor, name) for name in READS}

        def refuse(*args, **kwargs):
            raise RuntimeError("called a synchronizing operation")

        try:
            for name in READS:
                setattr(Tensor, name, refuse)
            yield
        finally:
            for name, original in originals.items():
                setattr(Tensor, name, original)

    def synchronize(self):
        pass

    def seconds(self, call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def copy_gb_per_s(self):
        return 10.0


def assign(target, source):
    if isinstance(target, Tensor):
        target.copy_(source)
    elif target is not None:
        for mine, theirs in zip(target, source, strict=True):
            assign(mine, theirs)
