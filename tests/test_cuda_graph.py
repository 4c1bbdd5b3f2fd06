"""The order of calls to torch.cuda around a recording, on a stand-in for it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from specdec_kernels.cuda_graph import WARM_UPS, CudaGraph

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """What happens, in order, with the name of the stream that is current."""
    log: list[str] = []
    state = {"stream": Stream(log, "main")}

    class Graph:
        def pool(self):
            return f"pool of {id(self)}"

        def replay(self):
            log.append("replay")

    @contextlib.contextmanager
    def on(stream):
        before, state["stream"] = state["stream"], stream
        yield
        state["stream"] = before

    @contextlib.contextmanager
    def recording(graph, pool, capture_error_mode):
        log.append(f"record {capture_error_mode} {pool}")
        state["stream"] = Stream(log, "recording")
        yield  # an error leaves the stream as it is, like torch's own
        state["stream"] = main

    main = state["stream"]
    replaced = {
        "CUDAGraph": Graph,
        "Stream": lambda: Stream(log, "side"),
        "current_stream": lambda: state["stream"],
        "set_stream": lambda stream: state.update(stream=stream),
        "stream": on,
        "graph": recording,
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return log


def call_on(log):
    def call():
        log.append(f"call on {torch.cuda.current_stream().name}")
        return "outputs"

    return call


def test_warm_ups_come_first_on_a_stream_of_their_own(log):
    graph = CudaGraph(call_on(log), DEVICE)
    assert log == [
        "side waits for main",
        *["call on side"] * WARM_UPS,
        "main waits for side",
        "record thread_local None",
        "call on recording",
    ]
    assert torch.cuda.current_stream().name == "main"
    assert graph.replay() == "outputs" and log[-1] == "replay"


def test_memory_is_shared_with_an_earlier_recording(log):
    first = CudaGraph(call_on(log), DEVICE)
    CudaGraph(call_on(log), DEVICE, first)
    assert f"record thread_local {first._graph.pool()}" in log


def test_an_error_leaves_the_stream_of_the_caller(log):
    def fails():
        if torch.cuda.current_stream().name == "recording":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraph(fails, DEVICE)
    assert torch.cuda.current_stream().name == "main"
