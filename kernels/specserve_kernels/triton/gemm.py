"""The GEMM of exact numerics: every output is summed over its inputs in one order, whatever the number of rows.

One tile of EXACT_GEMM_ROWS rows serves one row and a thousand (rows that are missing are zeros), and no split over
the inputs exists. A program's share of outputs follows from the weight's shape alone. int8 weights multiply the two
digits of int8.py in int32, exactly.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.int8 import BASE, quantize_activations
from specserve_kernels.ops import LinearWeight
from specserve_kernels.triton.launch import (
    EXACT_GEMM_DEPTH,
    EXACT_GEMM_ROWS,
    GEMM_OUT_NARROW,
    GEMM_OUT_WIDE,
    GEMM_STAGES,
    GEMM_WARPS,
    GEMM_WIDE_OUT,
    start,
)
from specserve_kernels.triton.numerals import product, rounded

_BASE = tl.constexpr(float(BASE))


@triton.jit
def linear_kernel(
    x, weight, out, rows, outs, size,
    ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, DEPTH)
    x_row = x + row.to(tl.int64)[:, None] * size
    weight_row = weight + output.to(tl.int64)[None, :] * size
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for first in range(0, size, DEPTH):
        k = first + step
        left = tl.load(x_row + k[None, :], mask=(row < rows)[:, None] & (k < size)[None, :], other=0.0)
        right = tl.load(weight_row + k[:, None], mask=(k < size)[:, None] & (output < outs)[None, :], other=0.0)
        total = product(left, right, total)
    place = out + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(place, rounded(total, out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outs)[None, :])


@triton.jit
def linear_int8_kernel(
    high, low, x_scale, weight, weight_scale, out, rows, outs, size,
    ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    step = tl.arange(0, DEPTH)
    x_row = row.to(tl.int64)[:, None] * size
    weight_row = weight + output.to(tl.int64)[None, :] * size
    highs = tl.zeros([ROWS, OUTS], tl.int32)
    lows = tl.zeros([ROWS, OUTS], tl.int32)
    for first in range(0, size, DEPTH):
        k = first + step
        mask = (row < rows)[:, None] & (k < size)[None, :]
        right = tl.load(weight_row + k[:, None], mask=(k < size)[:, None] & (output < outs)[None, :], other=0)
        highs = tl.dot(tl.load(high + x_row + k[None, :], mask=mask, other=0), right, highs)
        lows = tl.dot(tl.load(low + x_row + k[None, :], mask=mask, other=0), right, lows)
    scales = tl.load(x_scale + row, mask=row < rows, other=0.0)[:, None]
    weight_scales = tl.load(weight_scale + output, mask=output < outs, other=0.0)[None, :]
    value = (highs.to(tl.float32) * _BASE + lows.to(tl.float32)) * scales * weight_scales
    place = out + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(place, rounded(value, out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outs)[None, :])


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """[rows, in] → [rows, out], summed in fp32 over `in` in blocks of EXACT_GEMM_DEPTH, in order; or int8, exact."""
    rows, outs = x.shape[0], weight.raw.shape[0]
    out = x.new_empty(rows, outs, dtype=out_dtype or x.dtype)
    share = GEMM_OUT_WIDE if outs >= GEMM_WIDE_OUT else GEMM_OUT_NARROW
    grid = (triton.cdiv(outs, share), triton.cdiv(rows, EXACT_GEMM_ROWS))
    constants = {"ROWS": EXACT_GEMM_ROWS, "OUTS": share, "DEPTH": EXACT_GEMM_DEPTH}
    options = {"warps": GEMM_WARPS, "stages": GEMM_STAGES}
    if weight.scale is None:
        start(linear_kernel, grid, x, weight.raw, out, rows, outs, x.shape[1], **options, **constants)
    else:
        digits = quantize_activations(x)
        sizes = (out, rows, outs, x.shape[1])
        start(linear_int8_kernel, grid, *digits, weight.raw, weight.scale, *sizes, **options, **constants)
    return out
