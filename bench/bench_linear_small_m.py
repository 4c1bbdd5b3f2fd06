"""linear_small_m against torch.nn.functional.linear over every linear layer of SmolLM2-135M.

    python -m bench.bench_linear_small_m --dtype bf16 --rows 1,4,8,9,16,32,64

One sample runs all layers once, each with a weight of its own, so that weights come from memory
and not from the caches; samples of the two alternate, and medians are printed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.ops.linear_small_m import linear_small_m

LAYERS = 30
SHAPES = [
    (576, 576),
    (192, 576),
    (192, 576),
    (576, 576),
    (1536, 576),
    (1536, 576),
    (576, 1536),
]
HEAD = (49152, 576)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sample(function, weights: list[Tensor], inputs: dict[int, Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        function(inputs[weight.shape[1]], weight)
    return (time.perf_counter() - start) * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rows", default="1,2,4,6,8,9,12,16,24,32,48,64")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = DTYPES[options.dtype]
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES * LAYERS + [HEAD]]
    size = sum(weight.numel() for weight in weights)
    isa = native.cpu.isa() if native.cpu is not None else "reference"
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, {isa}, ", end=""
    )
    print(f"torch {torch.__version__}, {options.dtype}, {size * dtype.itemsize / 1e6:.0f} MB")
    print(f"{'M':>3} {'ours ms':>9} {'torch ms':>9} {'ratio':>6} {'GB/s':>6} {'GMAC/s':>7}")
    for rows in map(int, options.rows.split(",")):
        inputs = {depth: torch.randn(rows, depth).to(dtype) for depth in (576, 1536)}
        y = linear_small_m(inputs[576], weights[0])
        exact = inputs[576].double() @ weights[0].double().T
        assert (y.double() - exact).abs().max() < exact.abs().max() * 2**-7
        ours, rival = [], []
        for _ in range(options.samples):
            ours.append(sample(linear_small_m, weights, inputs))
            rival.append(sample(torch.nn.functional.linear, weights, inputs))
        mine, theirs = statistics.median(ours), statistics.median(rival)
        rates = f"{size * dtype.itemsize / mine / 1e6:6.1f} {size * rows / mine / 1e6:7.1f}"
        print(f"{rows:3d} {mine:9.2f} {theirs:9.2f} {theirs / mine:6.2f} {rates}", flush=True)


if __name__ == "__main__":
    main()
