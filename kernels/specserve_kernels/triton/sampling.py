"""Drawing on the device: Philox noise, truncation by thresholds, argmax, and the best ids of a row.

One program draws for one row, and one launch for all rows. Truncation needs no sort: logits become integers of the
same order, a bisection over them finds the value at which the count (top-k) or the mass (top-p) is reached, and among
equal logits at that value the lowest ids are kept, as specserve/sample.py defines it. Masses are fp64 sums in fixed
order. Integers of the noise equal the reference's; logarithms are fp64. Gumbel noise is computed only where a block
has survivors.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton.launch import ROW_WARPS, SAMPLE_BLOCK, SAMPLE_WARPS, TOP_BLOCK, padded, start

PURPOSE_TARGET = 0  # as in specserve_kernels, which imports no backend


@triton.jit
def _gumbel(ids, seed, draw_index, choice, purpose):
    """G of token ids (int32 block) for one key (int64 scalars): fp32, from Philox4x32-10 words."""
    c0 = (ids // 4).to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (draw_index & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (choice & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + purpose.to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a = zero + 0xD2511F53
    b = zero + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0 = tl.umulhi(a, c0)
        high1 = tl.umulhi(b, c2)
        low0 = a * c0
        low1 = b * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    lane = ids % 4
    word = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (0.0 - tl.log(0.0 - tl.log(uniform))).to(tl.float32)


@triton.jit
def noise_kernel(seed, draw_index, choice, purpose, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(seed + row), tl.load(draw_index + row), tl.load(choice + row)
    tl.store(out + row * size + ids, _gumbel(ids, keys[0], keys[1], keys[2], purpose), mask=ids < size)


def noise(seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
    """Gumbel noise fp32 [n, vocab_size] for n keys (int64 [n] each)."""
    rows = seed.shape[0]
    out = torch.empty(rows, vocab_size, dtype=torch.float32, device=seed.device)
    block = min(padded(vocab_size, 4), 1024)
    kind = torch.full((), purpose, dtype=torch.int64, device="cpu").item()
    grid = (rows, triton.cdiv(vocab_size, block))
    start(noise_kernel, grid, seed, draw_index, choice, kind, out, vocab_size, BLOCK=block, warps=ROW_WARPS)
    return out


@triton.jit
def _ordered(logits):
    """fp32 → int64 of the same order (−0 and +0 are one)."""
    raw = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw).to(tl.int64)


@triton.jit
def _count_and_mass(logits, size, key, largest, temperature, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """How many logits of a row have an order of at least `key`, or what softmax mass (of exp(x - largest)) they have."""
    total = tl.zeros([BLOCK], tl.float64) if MASS else tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        value = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        above = (_ordered(value) >= key) & (ids < size)
        if MASS:
            scaled = tl.div_rn(value, temperature).to(tl.float64)
            total += tl.where(above, tl.exp(scaled - largest), 0.0)
        else:
            total += above.to(tl.int32)
    return tl.sum(total, axis=0)
