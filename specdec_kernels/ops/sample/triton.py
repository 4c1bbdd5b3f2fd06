"""sample in Triton: a pass for the largest logits, thresholds where rows filter, a pass to draw."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch
from specdec_kernels.ops._triton_draw import draw
from specdec_kernels.ops._triton_extremes import Filters, best_key
from specdec_kernels.ops._triton_filters import prepare
from specdec_kernels.ops._triton_logits import Edits, Window
from specdec_kernels.ops._triton_numerics import pair_index
from specdec_kernels.tree import SamplingParams


def sample(logits: Tensor, *args: Any) -> Tensor:
    """Five launches. Reads the logits once, and those tiles once more that filters keep and noise
    could lift to the top; rows with top_k or top_p are weighed in between."""
    *fields, stream = args
    sampling = SamplingParams(*fields)
    filters = Filters(*(x.contiguous() for x in sampling[:4]))
    batch = prepare(logits.unsqueeze(1), Edits.of(sampling.edits), Window(), filters)
    keys = draw(batch, sampling.seed, sampling.position, stream)
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    grid = (logits.shape[0],)
    launch(_tokens_kernel, grid, logits, batch, keys, tokens, num_warps=1)
    return tokens


@triton.jit
def _tokens_kernel(batch, keys_ptr, tokens_ptr):
    row = tl.program_id(0)
    token = tl.load(batch.rows.tokens + row)
    if token < 0:
        token = pair_index(best_key(keys_ptr, row, batch.cuts))
    tl.store(tokens_ptr + row, token)
