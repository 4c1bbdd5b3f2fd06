"""CUDA graphs of verify forwards, and what of them outlives a run.

A forward launches hundreds of small kernels; a recording of it is launched at once. A recording
holds addresses and takes no notice of Python: `why_not_recorded` and `state_of` tell where that
matters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec_kernels.cache import RaggedKV
from specdec_kernels.cuda_graph import CudaGraph
from specdec_kernels.hf.buffers import WindowBuffers
from specdec_kernels.hf.forwards import may_replace

KNOWN_CODE = ("torch.", "transformers.")

Outputs = tuple[Tensor, Tensor | None]  # logits [B, T, V] and features [B, T, n]


def can_record(device: torch.device) -> bool:
    return device.type == CudaGraph.device_type


@dataclass
class Recordings:
    """Recordings by width, with the K/V storage and the buffers whose addresses they hold."""

    kv: RaggedKV
    state: tuple
    by_width: dict[int, tuple[WindowBuffers, CudaGraph]] = field(default_factory=dict)

    def record(self, buffers: WindowBuffers, call: Callable[[], Outputs]) -> None:
        earlier = next((graph for _, graph in self.by_width.values()), None)
        graph = CudaGraph(call, self.kv.prefix_len.device, earlier)
        self.by_width[buffers.width] = buffers, graph


class Shelf:
    """Where the recordings of a model lie between its runs; one run at a time has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Recordings | None = None

    def take(self, model: nn.Module, batch: int, max_slots: int) -> Recordings | None:
        """The recordings for this batch, if the model is as it was."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None or kept.kv.batch != batch or kept.state != state_of(model):
            return None
        kept.kv.start_again(max_slots)
        return kept

    def put(self, model: nn.Module, recordings: Recordings) -> None:
        """Keeps them, unless code that we do not know may change what the model computes."""
        if recordings.by_width and all(_is_known(type(m)) for m in model.modules()):
            with self._lock:
                self._kept = recordings


def why_not_recorded(model: nn.Module) -> str | None:
    """The first thing that would happen in a forward and not in the replay of a recording."""
    for name, module in model.named_modules():
        shown = f"{name or 'the model'} ({type(module).__name__})"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(_is_ours, hooks)):
            return f"hooks of {shown} would not run"
        if not may_replace(module):
            return f"{shown} has a forward of its own, put on the instance"
    return None


def state_of(model: nn.Module) -> tuple:
    """What a recording depends on beside its buffers: addresses of the weights, and modes."""
    tensors = (*model.parameters(), *model.buffers())
    return (
        tuple((t.data_ptr(), t.dtype) for t in tensors),
        tuple(m.training for m in model.modules()),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
    )


def _is_ours(hook: Callable) -> bool:
    """Those of runs in other threads come and go, and do nothing in this one."""
    return getattr(hook, "__module__", "").startswith("specdec_kernels.")


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(KNOWN_CODE)
