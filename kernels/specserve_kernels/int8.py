"""What int8 means here, once for all backends: weights of 8 bits, activations of two digits of 8 bits each.

An output's weights are integers up to 127 times one scale. A row of activations is integers up to 127 * 256 times one
scale, and each of them is 256 * high + low. Integers come from x * (largest integer / max|x|), rounded half to even:
fp32 operations with one rounding each, so that every backend finds the same ones. The two dot products, of the high and
of the low digits, are exact in any order, which is why rows cannot see each other in this format. An output is
(256 * fp32(high sum) + fp32(low sum)) * x_scale * weight_scale in fp32, from left to right, rounded to the type asked
for. A row that is not finite has scale NaN: it gives NaN everywhere and is found where hidden states are checked.

Why two digits: with one, the few large values that a Llama's rows have left the others too few levels: the perplexity
of the demo model rose by 5.4 %, with two by 0.5 %. The second digit costs no memory traffic, only half of the tiles'
time, which decoding does not need.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specserve_kernels.ops import QUANTIZATIONS, LinearWeight

LIMIT = 127  # of a weight and of a high digit: symmetric
BASE = 256  # low digits lie in [-128, 127]
# Rows smaller than this become zeros: 127 * 256 / FLOOR is finite, and no real activation is near it.
FLOOR = 2.0**-100
# Sums of so many products fit int32.
MAX_IN_FEATURES = (2**31 - 1) // (LIMIT * BASE // 2)
_ROWS_AT_ONCE = 64  # the passes over a block of rows find it in cache; no value depends on it


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, in] of bf16 or fp32 → one digit: integers int8 [rows, in] and scales fp32 [rows]."""
    integers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    for start in range(0, x.shape[0], _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        integers[block], scales[block] = _integers(x[block], LIMIT)
    return integers, scales


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, in] of bf16 or fp32 → high and low digits int8 [rows, in], and scales fp32 [rows]."""
    integers, scales = _integers(x, LIMIT * BASE)
    whole = integers.to(torch.int32)
    high = (whole + BASE // 2) >> 8
    return high.to(torch.int8), (whole - BASE * high).to(torch.int8), scales


def _integers(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to `limit` as fp32 [rows, in], and what each row's are to be multiplied by, fp32 [rows]."""
    wide = x.float()
    largest = wide.abs().amax(1).clamp_min(FLOOR)
    finite = largest.isfinite()
    limits = torch.full_like(largest, limit)  # a number / tensor is number * (1 / tensor) in torch: two roundings
    scaled = wide * (limits / largest)[:, None]
    whole = scaled.round().masked_fill(~finite[:, None], 0.0)
    return whole, (largest / limits).masked_fill(~finite, math.nan)


def quantize_weight(weight: Tensor, quantization: str = "int8") -> LinearWeight:
    """A weight [out, in] as integers and one scale per output, not packed for any backend.

    Raises:
        ValueError: an unknown quantization, or `in` is so large that sums could leave int32.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization is {quantization!r}; allowed: {', '.join(QUANTIZATIONS)}")
    if weight.shape[1] > MAX_IN_FEATURES:
        raise ValueError(f"int8 weights have at most {MAX_IN_FEATURES} inputs, this one has {weight.shape[1]}")
    integers, scales = quantize_rows(weight)
    return LinearWeight(raw=integers, scale=scales, dtype=weight.dtype)


def dequantize_rows(ids: Tensor, table: LinearWeight) -> Tensor:
    """Rows `ids` of a quantized weight, in the type that it had."""
    assert table.scale is not None and table.dtype is not None
    rows = table.raw.index_select(0, ids).float() * table.scale.index_select(0, ids)[:, None]
    return rows.to(table.dtype)


def rescale(high: Tensor, low: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Integer sums [rows, out] of both digits → values."""
    sums = high.float() * BASE + low.float()
    return (sums * x_scale[:, None] * weight_scale).to(out_dtype)
