"""The model's RMS norms through rms_norm in verify forwards: one pass for torch's eight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels.dispatch import why_unavailable
from specdec_kernels.hf.forwards import OTHER, PREFILL, Forward, Replaced, active, may_replace
from specdec_kernels.ops._checks import FLOATS
from specdec_kernels.ops.rms_norm import reference


def norm_forwards(model: nn.Module) -> Replaced:
    """The modules called RMS norms whose results are, bit for bit, those of rms_norm's reference.

    Others scale by 1 + weight, or round elsewhere.
    """
    return [(m, _forward_of(m)) for m in model.modules() if _is_eligible(m)]


def _forward_of(module: nn.Module) -> Forward:
    parameters: Any = module._parameters
    eps, original = _eps(module), type(module).forward

    def forward(x: Tensor) -> Tensor:
        weight = parameters["weight"]
        if active.kind in (OTHER, PREFILL) or x.dtype is not weight.dtype:
            return original(module, x)
        return active.norm(x, weight, eps)

    return forward


def _is_eligible(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        "RMSNorm" in type(module).__name__
        and may_replace(module)
        and type(weight) is nn.Parameter
        and weight.dim() == 1
        and weight.dtype in FLOATS
        and weight.device.type == "cpu"
        and isinstance(_eps(module), float)
        and why_unavailable("cpu", "cpu") is None
        and _agrees(module, weight, _eps(module))
    )


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


@torch.no_grad()
def _agrees(module: nn.Module, weight: Tensor, eps: float) -> bool:
    x = torch.arange(1, 3 * len(weight) + 1, dtype=torch.float64).view(1, 3, -1)
    x = (x.sin() * x).to(weight.dtype)
    try:
        expected = type(module).forward(module, x)
    except Exception:  # it wants other arguments
        return False
    return isinstance(expected, Tensor) and torch.equal(
        expected, reference.rms_norm(x, weight, eps)
    )
