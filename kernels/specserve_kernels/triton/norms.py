"""The small operations of a layer: RMSNorm (with the residual sum in front of it), SwiGLU, rotation, embedding.

One program works on one row, or on a piece of one, and nothing it does depends on other rows: these kernels are exact
as they stand. Sums run over a row in blocks of fixed size, in order; arithmetic is fp32, rounded as the protocol says.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton.launch import ELEMENT_BLOCK, NORM_BLOCK, ROPE_HEADS, ROW_WARPS, padded, start
from specserve_kernels.triton.numerals import rounded


@triton.jit
def rms_norm_kernel(x, delta, weight, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < size, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(delta + row + column, mask=column < size, other=0.0).to(tl.float32)
            stored = rounded(value, total.dtype.element_ty)
            tl.store(total + row + column, stored, mask=column < size)
            value = stored.to(tl.float32)
        squares += value * value
    root = tl.sqrt(tl.sum(squares, axis=0) / size + eps)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < size, other=0.0).to(tl.float32)
        if ADD:  # the sum again: what this program stored may not be visible to its other threads
            value += tl.load(delta + row + column, mask=column < size, other=0.0).to(tl.float32)
            value = rounded(value, total.dtype.element_ty).to(tl.float32)
        normed = rounded(value / root, out.dtype.element_ty).to(tl.float32)
        scaled = normed * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
        tl.store(out + row + column, rounded(scaled, out.dtype.element_ty), mask=column < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, hidden] → x / sqrt(mean(x²) + eps) in fp32, rounded to x's dtype, times weight."""
    out = torch.empty_like(x)
    block = min(padded(x.shape[1], 16), NORM_BLOCK)
    grid = (x.shape[0],)
    start(rms_norm_kernel, grid, x, x, weight, x, out, x.shape[1], eps, ADD=False, BLOCK=block, warps=ROW_WARPS)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, rounded to x's dtype, and its `rms_norm`; all [rows, hidden]. Same bits as the two apart."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = min(padded(x.shape[1], 16), NORM_BLOCK)
    grid = (x.shape[0],)
    start(rms_norm_kernel, grid, x, delta, weight, total, out, x.shape[1], eps, ADD=True, BLOCK=block, warps=ROW_WARPS)
    return total, out


@triton.jit
def silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * inner + column, mask=column < inner, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + column, mask=column < inner, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, rounded(value, out.dtype.element_ty), mask=column < inner)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * inner] → silu(first half) * second half, [rows, inner], in fp32."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    block = min(padded(inner, 16), ELEMENT_BLOCK)
    start(silu_mul_kernel, (rows, triton.cdiv(inner, block)), gate_up, out, inner, BLOCK=block, warps=ROW_WARPS)
    return out


@triton.jit
def rope_kernel(x, positions, table, out, heads, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, HEADS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_PADDED)
    angle = table + tl.load(positions + row) * (2 * HALF) + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
    place = (row * heads + head[:, None]) * (2 * HALF) + pair[None, :]
    mask = (head < heads)[:, None] & (pair < HALF)[None, :]
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, rounded(first * cos - second * sin, out.dtype.element_ty), mask=mask)
    tl.store(out + place + HALF, rounded(second * cos + first * sin, out.dtype.element_ty), mask=mask)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate [rows, heads, head_dim] by halves in fp32; `table` fp32 [max_positions, head_dim]: cos, then sin."""
    rows, heads, dim = x.shape
    out = torch.empty_like(x)
    block = min(padded(heads), ROPE_HEADS)
    grid = (rows, triton.cdiv(heads, block))
    constants = {"HALF": dim // 2, "HALF_PADDED": padded(dim // 2), "HEADS": block}
    start(rope_kernel, grid, x, positions, table, out, heads, warps=ROW_WARPS, **constants)
    return out


@triton.jit
def embed_kernel(ids, table, scale, out, size, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    value = tl.load(table + token * size + column, mask=column < size, other=0)
    if SCALED:
        value = rounded(value.to(tl.float32) * tl.load(scale + token), out.dtype.element_ty)
    tl.store(out + row * size + column, value, mask=column < size)


def embed(ids: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """int64 [rows] → rows of `table` [vocab, hidden], times their `scale` fp32 [vocab] if there is one, as `dtype`."""
    rows, size = ids.shape[0], table.shape[1]
    out = torch.empty(rows, size, dtype=dtype, device=table.device)
    block = min(padded(size, 16), ELEMENT_BLOCK)
    grid = (rows, triton.cdiv(size, block))
    scales = table if scale is None else scale
    start(embed_kernel, grid, ids, table, scales, out, size, SCALED=scale is not None, BLOCK=block, warps=ROW_WARPS)
    return out
