"""The specification of topk_logprobs in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels.ops import _numerics
from specdec_kernels.ops.sample.reference import in_working_precision, mass_as_float, masses


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = in_working_precision(logits)
    logits = torch.where(logits.isnan(), -math.inf, logits) + 0.0  # -0 and 0 are a tie
    largest = logits.amax(-1, keepdim=True)
    empty = largest == -math.inf
    one_hot = torch.where(logits == math.inf, 0.0, -math.inf).to(logits.dtype)
    centred = torch.where(largest == math.inf, one_hot, logits - largest)
    centred = torch.where(empty, -math.inf, centred)
    mass = masses(centred, centred > -math.inf).sum(-1, keepdim=True)
    log_sum = torch.where(empty, 0.0, _numerics.log(mass_as_float(mass, logits.shape[-1])))

    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    missing = (0, k - order.shape[1])
    logprobs = torch.nn.functional.pad(
        centred.gather(-1, order) - log_sum, missing, value=-math.inf
    )
    ids = torch.nn.functional.pad(order, missing, value=-1)
    ids = torch.where(logprobs > -math.inf, ids, -1)
    return logprobs, ids, (largest + log_sum).squeeze(-1)
