"""Two operations that Triton's interpreter does otherwise than a device: rounding to bf16 and multiplying it.

On a device `rounded` is a cast and `product` one `tl.dot`. The interpreter cuts bf16 off instead of rounding, and
multiplies its bits as integers; there, both say in fp32 what the device does.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from specserve_kernels.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 → dtype, to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        raw = x.to(tl.int32, bitcast=True)
        even = (raw + 0x7FFF + ((raw >> 16) & 1)) & -0x10000
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def product(a, b, total):
    """total + a @ b: fp32 sums in order (fp32 inputs are not cut to tf32)."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
