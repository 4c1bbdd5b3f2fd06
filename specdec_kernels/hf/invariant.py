"""linear="invariant": what else of a forward depends on how many rows it has, and the remedies.

Matrix products do: libraries choose their kernels by shape. So do functions that torch computes in
whole vectors and, for the elements left over at the end or between threads, one by one with another
exponential. A forward is watched once; modules that run such operations are replaced while ours
run, and what has no remedy is named. The replaced ones cut their inputs so that every row is
computed in the same way whatever the others are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels.ops.linear_small_m import linear_small_m

# torch runs fewer elements than this in one thread, and vectors have at most this many.
SERIAL_ELEMENTS = 32768
VECTOR = 64


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """
    alias view _unsafe_view reshape _reshape_alias as_strided expand transpose permute t slice
    select split split_with_sizes chunk unbind squeeze unsqueeze unfold movedim detach clone copy_
    _to_copy contiguous cat stack repeat repeat_interleave empty empty_like zeros zeros_like ones
    ones_like full full_like new_empty new_zeros new_ones new_full fill_ zero_ arange lift_fresh
    scalar_tensor _local_scalar_dense is_nonzero index index_select index_put index_put_
    index_copy index_copy_ gather scatter scatter_ masked_fill masked_fill_ masked_scatter where
    embedding one_hot nonzero sort topk argsort argmax any all eq ne lt le gt ge logical_and
    logical_or logical_not logical_xor isnan isinf bitwise_and bitwise_or bitwise_not tril triu
    roll flip constant_pad_nd empty_strided histc
    """
)
# Correctly rounded, so the same by every path; and those of Intel's vector library, which treats
# left-over elements like the others (measured element by element).
EXACT = _names(
    """
    add add_ sub sub_ rsub mul mul_ div div_ neg abs relu relu_ clamp clamp_ clamp_min clamp_max
    maximum minimum sqrt reciprocal square sign floor ceil round threshold exp tanh cos sin
    erf log log1p
    """
)
# Each output looks at one row, in an order that only the row's length decides.
ROW_WISE = _names("_softmax _log_softmax native_layer_norm _fused_rms_norm index_add index_add_")
REDUCTIONS = _names("mean sum var amax amin max min logsumexp")
SMOOTH = _names("silu gelu sigmoid softplus mish elu celu log_sigmoid_forward")
SMOOTH_IN_16_BITS = _names("rsqrt")
PRODUCTS = _names("mm addmm bmm baddbmm _grouped_mm")


def kind(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """One of "even", "smooth", "product" or "unknown": how an operation treats rows."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if name.startswith("specdec_kernels::") or name in MOVES or name in EXACT or name in ROW_WISE:
        return "even"
    if tensors and not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return "even"
    if name in REDUCTIONS:
        return "even" if _keeps_rows(tensors[0], args) else "unknown"
    if name == "cumsum":  # of counts
        return "even" if options.get("dtype") in (torch.int32, torch.int64) else "unknown"
    if name == "pow":
        return _kind_of_power(args)
    if name in SMOOTH_IN_16_BITS:
        return "even" if tensors[0].dtype == torch.float32 else "smooth"
    if name == "bmm" and tensors[0].shape[2] == 1:
        return "even"
    return "smooth" if name in SMOOTH else "product" if name in PRODUCTS else "unknown"


def _kind_of_power(args: tuple[Any, ...]) -> str:
    """torch multiplies for small whole exponents; others go through another function for tails."""
    if not isinstance(args[0], Tensor) or isinstance(args[1], Tensor):
        return "unknown"
    return "even" if args[1] in (1, 2, 3) else "smooth"


def _keeps_rows(x: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a reduction leaves the first dimension, that of rows, alone."""
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, (list, tuple)) and (x.dim() == 1 or all(d % x.dim() > 0 for d in dims))


class Survey(TorchDispatchMode):
    """Notes which modules run operations that do not treat rows evenly.

    found: by module, (names of all operations that it runs itself, the uneven ones by kind).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[nn.Module | None, tuple[set[str], dict[str, set[str]]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = _name(func)
        names, uneven = self.found.setdefault(_caller(), (set(), {}))
        names.add(name)
        what = kind(name, args, kwargs or {})
        if what != "even":
            uneven.setdefault(what, set()).add(name)
        return func(*args, **(kwargs or {}))

    def uneven(self) -> Iterator[tuple[nn.Module | None, set[str], dict[str, set[str]]]]:
        for module, (names, uneven) in self.found.items():
            if uneven:
                yield module, names, uneven


def _name(func: Any) -> str:
    namespace, _, rest = func._schema.name.partition("::")
    return rest if namespace == "aten" else func._schema.name


def _caller() -> nn.Module | None:
    """The module whose code, or whose function, called torch."""
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


class RowWise(TorchDispatchMode):
    """Cuts the operations that do not treat rows evenly."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = _name(func)
        what = kind(name, args, options)
        if what == "smooth":
            return by_rows(lambda x: func(x, *args[1:], **options), args[0])
        if what == "product":
            return _product(name, func, args, options)
        return func(*args, **options)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function, with as many rows at once as leaves each row's bits alone."""
    if x.numel() == 0:
        return function(x)
    width = x.shape[-1] if x.dim() else 1
    rows = x.numel() // width
    some = rows_at_once(rows, width)
    x = x.contiguous()
    if some >= rows:
        return function(x)
    flat = x.view(rows, width)
    return torch.cat([function(flat[i : i + some]) for i in range(0, rows, some)]).view(x.shape)


def rows_at_once(rows: int, width: int) -> int:
    """So many that no row has elements left over: torch cuts between threads, not between rows."""
    if width % VECTOR:
        return 1
    elements = rows * width
    threads = min(torch.get_num_threads(), -(-elements // SERIAL_ELEMENTS))
    if threads <= 1 or -(-elements // threads) % VECTOR == 0:
        return rows
    return max(1, (SERIAL_ELEMENTS - 1) // width)


def _product(name: str, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    if name == "mm":
        return _matrix(args[0], args[1], None)
    if name == "addmm" and not options:
        return _matrix(args[1], args[2], args[0])
    if name == "_grouped_mm" and args[0].dim() == 2 and args[1].dim() == 3:
        return _grouped(args[0], args[1], args[2] if len(args) > 2 else options["offs"])
    if name == "bmm":
        return torch.stack([_matrix(a, b, None) for a, b in zip(args[0], args[1], strict=True)])
    if name == "baddbmm" and not options:
        bias = args[0].expand(args[1].shape[0], args[1].shape[1], args[2].shape[2])
        return torch.stack([_matrix(a, b, c) for c, a, b in zip(bias, *args[1:3], strict=True)])
    return func(*args, **options)


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows behind the last end belong to no expert and stay zero."""
    out = x.new_zeros(x.shape[0], weights.shape[2])
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > begin:
            out[begin:end] = _matrix(x[begin:end], weight, None)
        begin = end
    return out


def _matrix(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ weight [K, N] + bias [N] or [M, N], each row by itself."""
    if weight.stride(0) == 1 and (bias is None or bias.dim() == 1) and x.dtype == weight.dtype:
        return linear_small_m(x, weight.t(), bias)
    rows = []
    for i in range(x.shape[0]):
        row = x[i : i + 1].clone()  # libraries choose their kernels by alignment, too
        if bias is None:
            rows.append(row @ weight)
        else:
            rows.append(torch.addmm(bias[i : i + 1] if bias.dim() == 2 else bias, row, weight))
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


def is_elementwise(module: nn.Module, names: set[str]) -> bool:
    """Whether a module without children runs nothing but functions of single elements."""
    pure = SMOOTH | SMOOTH_IN_16_BITS | EXACT
    return not any(True for _ in module.children()) and names <= pure


__all__ = ["RowWise", "Survey", "by_rows", "is_elementwise", "kind", "rows_at_once"]
