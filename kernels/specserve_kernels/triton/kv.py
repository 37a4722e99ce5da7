"""Writing and moving the paged KV: plain, fused with rotation, and as fp8.

Caches are [pages, kv_heads, page_size, head_dim] and every offset into them is int64. A slot below zero is a row of
padding and is not written. An fp8 cache holds e4m3 values: stored = value / scale, per kv head, rounded to nearest
even and limited to ±448. The codes are made by integer arithmetic here, the same on every device: sm_80 has no
instruction for it, and it happens once per token.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton.launch import HEAD_WARPS, MOVE_DIM, MOVE_SLOTS, ROW_WARPS, padded, start
from specserve_kernels.triton.numerals import rounded

E4M3_MAX = 448.0


@triton.jit
def e4m3_codes(x):
    """fp32 → e4m3 as uint8, to nearest even, beyond ±448 to ±448, NaN to NaN."""
    raw = x.to(tl.int32, bitcast=True)
    size = tl.minimum(raw & 0x7FFFFFFF, 0x43E00000)  # the bits of 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are steps of 2^-9, which is the last bit of numbers near 2^14
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return (code | ((raw >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _slot_offset(slot, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Where a slot (int64) of one kv head begins in a cache."""
    return ((slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE) * DIM


@triton.jit
def _store(cache, place, value, mask, scale, FP8: tl.constexpr):
    """`value` as the model has it, into a cache of its type or of e4m3 codes."""
    if FP8:
        tl.store(cache + place, e4m3_codes(value.to(tl.float32) / scale), mask=mask)
    else:
        tl.store(cache + place, value, mask=mask)


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, scales, slots,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    slot = tl.load(slots + row)
    mask = (head < tl.where(slot >= 0, KV_HEADS, 0)) & (dim < DIM)
    source = (row * KV_HEADS + head) * DIM + dim
    place = _slot_offset(slot, head, KV_HEADS, PAGE, DIM) + dim
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale = tl.load(scales + head, mask=head < KV_HEADS, other=1.0)
        v_scale = tl.load(scales + KV_HEADS + head, mask=head < KV_HEADS, other=1.0)
    _store(k_cache, place, tl.load(k + source, mask=mask, other=0.0), mask, k_scale, FP8)
    _store(v_cache, place, tl.load(v + source, mask=mask, other=0.0), mask, v_scale, FP8)


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store k, v [rows, kv_heads, head_dim] at `slots` int64 [rows]; `scales` fp32 [2, kv_heads] of an fp8 cache."""
    rows, kv_heads, dim = k.shape
    k_cache, v_cache, fp8 = stored(k_cache), stored(v_cache), is_fp8(k_cache)
    start(
        write_kv_kernel, (rows,), k, v, k_cache, v_cache, scales_or(scales, k_cache, fp8), slots,
        KV_HEADS=kv_heads, HEADS=padded(kv_heads), PAGE=k_cache.shape[2], DIM=dim, DIM_PADDED=padded(dim), FP8=fp8,
        warps=ROW_WARPS,
    )  # fmt: skip


@triton.jit
def rope_write_kv_kernel(
    qkv, positions, table, q_out, k_cache, v_cache, scales, slots,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One program is one head of one row: a query, a key (both rotated) or a value."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    pair = tl.arange(0, HALF_PADDED)
    mask = pair < HALF
    source = qkv + (row * (Q_HEADS + 2 * KV_HEADS) + index) * (2 * HALF) + pair
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    if index < Q_HEADS + KV_HEADS:
        angle = table + tl.load(positions + row) * (2 * HALF) + pair
        cos = tl.load(angle, mask=mask, other=0.0)
        sin = tl.load(angle + HALF, mask=mask, other=0.0)
        left, right = first.to(tl.float32), second.to(tl.float32)
        first = rounded(left * cos - right * sin, qkv.dtype.element_ty)
        second = rounded(right * cos + left * sin, qkv.dtype.element_ty)
    if index < Q_HEADS:
        target = q_out + (row * Q_HEADS + index) * (2 * HALF) + pair
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)
    else:
        slot = tl.load(slots + row)
        mask = pair < tl.where(slot >= 0, HALF, 0)
        of_v = index >= Q_HEADS + KV_HEADS
        head = index - Q_HEADS - tl.where(of_v, KV_HEADS, 0)
        place = _slot_offset(slot, head, KV_HEADS, PAGE, 2 * HALF) + pair
        scale = 1.0
        if FP8:
            scale = tl.load(scales + index - Q_HEADS)
        if of_v:
            _store(v_cache, place, first, mask, scale, FP8)
            _store(v_cache, place + HALF, second, mask, scale, FP8)
        else:
            _store(k_cache, place, first, mask, scale, FP8)
            _store(k_cache, place + HALF, second, mask, scale, FP8)


def rope_write_kv(
    qkv: Tensor, positions: Tensor, table: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`rope` of q and k and `write_kv` in one launch, the same bits.

    `qkv` [rows, (heads + 2 * kv_heads) * head_dim] as the projection gives it → rotated q [rows, heads, head_dim].
    """
    _, kv_heads, page_size, dim = k_cache.shape
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(rows, heads, dim)
    k_cache, v_cache, fp8 = stored(k_cache), stored(v_cache), is_fp8(k_cache)
    start(
        rope_write_kv_kernel, (rows, heads + 2 * kv_heads), qkv, positions, table, q, k_cache, v_cache,
        scales_or(scales, k_cache, fp8), slots, Q_HEADS=heads, KV_HEADS=kv_heads, PAGE=page_size, HALF=dim // 2,
        HALF_PADDED=padded(dim // 2), FP8=fp8, warps=HEAD_WARPS,
    )  # fmt: skip
    return q


@triton.jit
def move_kv_kernel(
    kv, held, source, target, count, pages,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, SLOTS: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One program owns some dims of one kv head of one layer: it reads all sources before it writes any target."""
    plane = tl.program_id(0).to(tl.int64)  # layer, k or v, kv head
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)[None, :]
    move = tl.program_id(2) * SLOTS + tl.arange(0, SLOTS)
    mask = (move < count)[:, None] & (dim < DIM)
    base = kv + plane // KV_HEADS * pages * (KV_HEADS * PAGE * DIM) + dim
    staged = held + (plane * count + move[:, None]) * DIM + dim
    if READ:
        slot = tl.load(source + move, mask=move < count, other=0)
        value = tl.load(base + _slot_offset(slot, plane % KV_HEADS, KV_HEADS, PAGE, DIM)[:, None], mask=mask, other=0)
    else:
        value = tl.load(staged, mask=mask, other=0)
    if WRITE:
        tl.debug_barrier()  # between the reads of all threads and the first write
        slot = tl.load(target + move, mask=move < count, other=0)
        tl.store(base + _slot_offset(slot, plane % KV_HEADS, KV_HEADS, PAGE, DIM)[:, None], value, mask=mask)
    else:
        tl.store(staged, value, mask=mask)


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots `source` → `target` (int64 [n]) in all layers of kv [layers, 2, pages, kv_heads, page_size, dim].

    Up to MOVE_SLOTS slots in one launch; more are read into a buffer by one launch and written by a second.
    """
    layers, _, pages, kv_heads, page_size, dim = kv.shape
    count, kv = source.shape[0], stored(kv)
    at_once = count <= MOVE_SLOTS
    held = kv if at_once else kv.new_empty(layers * 2 * kv_heads, count, dim)
    slots = min(padded(count), MOVE_SLOTS) if count else 1
    grid = (layers * 2 * kv_heads, triton.cdiv(dim, MOVE_DIM), triton.cdiv(count, slots))
    for read, write in [(True, True)] if at_once else [(True, False), (False, True)]:
        start(
            move_kv_kernel, grid, kv, held, source, target, count, pages, KV_HEADS=kv_heads, PAGE=page_size, DIM=dim,
            DIMS=MOVE_DIM, SLOTS=slots, READ=read, WRITE=write, warps=ROW_WARPS,
        )  # fmt: skip


def is_fp8(cache: Tensor) -> bool:
    """Whether a cache holds e4m3 codes."""
    return cache.dtype in (torch.float8_e4m3fn, torch.uint8)


def stored(cache: Tensor) -> Tensor:
    """The cache as kernels see it: e4m3 as its codes."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def scales_or(scales: Tensor | None, placeholder: Tensor, fp8: bool) -> Tensor:
    """The scales of an fp8 cache; any tensor for one that has none.

    Raises:
        ValueError: scales are missing, or there are some for a cache that is not fp8.
    """
    if fp8 != (scales is not None):
        raise ValueError("scales go with an fp8 cache, and an fp8 cache needs them")
    return placeholder if scales is None else scales
