"""Repairs Triton 3.9's interpreter for bf16, which it keeps as raw 16-bit integers and computes on
as such: arithmetic, dot products, casts and rounding. Also the type of comparisons, which scalar
masks trip over, and products of fp32 in three parts, which it computes as whole ones. Importing
this file is enough. A sum of bf16 stays wrong: kernels sum in fp32.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

binary_op, unary_op = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
cast_impl, create_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
create_fp_to_fp = InterpreterBuilder.create_fp_to_fp


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def to_fp32(handle: TensorHandle) -> np.ndarray:
    if not is_bf16(handle):
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> TensorHandle:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(np.where(np.isnan(values), np.uint16(0x7FFF), rounded), tl.bfloat16)


def repaired_binary_op(self, left, right, op):
    if not is_bf16(left):
        result = binary_op(self, left, right, op)
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        return result
    values = op(to_fp32(left), to_fp32(right))
    return TensorHandle(values, tl.int1) if values.dtype == np.bool_ else to_bf16(values)


def repaired_unary_op(self, argument, op):
    if is_bf16(argument):
        return to_bf16(op(to_fp32(argument)))
    return unary_op(self, argument, op)


def repaired_cast(self, source, target):
    if is_bf16(source) and target.scalar != tl.bfloat16:
        dtype = interpreter._get_np_dtype(target)
        return TensorHandle(to_fp32(source).astype(dtype), target.scalar)
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return to_bf16(source.data)
    return cast_impl(self, source, target)


def repaired_fp_to_fp(self, source, target, rounding_mode):
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return to_bf16(source.data)
    return create_fp_to_fp(self, source, target, rounding_mode)


def tf32_parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What tensor cores see of fp32, which is cut to 11 bits, and of what that leaves over."""

    def cut(x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view(np.uint32) & 0xFFFFE000).view(np.float32)

    return cut(values), cut(values - cut(values))


def repaired_dot(self, a, b, start, input_precision, max_num_imprecise_acc):
    a, b = (TensorHandle(to_fp32(x), tl.float32) if is_bf16(x) else x for x in (a, b))

    def dot(x, y, start):
        x, y = (TensorHandle(z, tl.float32) for z in (x, y))
        return create_dot(self, x, y, start, input_precision, max_num_imprecise_acc)

    if input_precision == INPUT_PRECISION.TF32x3 and a.dtype.scalar == tl.float32:
        (a, a_rest), (b, b_rest) = (tf32_parts(x.data) for x in (a, b))
        return dot(a, b, dot(a, b_rest, dot(a_rest, b, start)))
    return create_dot(self, a, b, start, input_precision, max_num_imprecise_acc)


InterpreterBuilder.binary_op = repaired_binary_op
InterpreterBuilder.unary_op = repaired_unary_op
InterpreterBuilder.cast_impl = repaired_cast
InterpreterBuilder.create_fp_to_fp = repaired_fp_to_fp
InterpreterBuilder.create_dot = repaired_dot


# A jit function that a kernel calls finds the language patched already; looking again for what to
# patch takes longer than the call.
patch_lang = interpreter._patch_lang


def patch_lang_once(function):
    modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
    if any(tl.core.is_builtin(m.arange) for m in modules):
        return patch_lang(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = patch_lang_once
