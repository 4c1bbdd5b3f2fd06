"""A recording of work for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2  # what is compiled, tuned or allocated once is done before it is recorded


class CudaGraph:
    """What `call` makes the device do.

    call: reads and writes only tensors that live as long as the recording. `replay` does the same
        work again and returns what the recorded call returned, with new contents.
    earlier: a recording whose outputs are not read any more when this one is replayed, and the
        other way round: they share their memory.

    Raises whatever `call` raises, and RuntimeError where it waits for the device.
    """

    device_type = "cuda"

    def __init__(
        self, call: Callable[[], Any], device: torch.device, earlier: CudaGraph | None = None
    ):
        self._graph = torch.cuda.CUDAGraph()
        pool = None if earlier is None else earlier._graph.pool()
        with torch.cuda.device(device):
            stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
            try:
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    for _ in range(WARM_UPS):
                        call()
                stream.wait_stream(side)
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                    self.outputs = call()
            finally:
                torch.cuda.set_stream(stream)  # after an error the recording's own is left behind

    def replay(self) -> Any:
        self._graph.replay()
        return self.outputs
