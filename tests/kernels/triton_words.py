"""A kernel for the tests: Philox's four words of one counter."""

from __future__ import annotations

import triton
import triton.language as tl
from specserve_kernels.triton.sampling import philox


@triton.jit
def words_kernel(seed, draw_index, choice, out, purpose, block, BLOCK: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    """`out` int64 [4]."""
    counter = tl.load(block + tl.arange(0, BLOCK))
    c0, c1, c2, c3 = philox(counter, tl.load(seed), tl.load(draw_index), tl.load(choice), purpose)
    place = tl.arange(0, BLOCK)
    tl.store(out + place, c0.to(tl.int64))
    tl.store(out + 1 + place, c1.to(tl.int64))
    tl.store(out + 2 + place, c2.to(tl.int64))
    tl.store(out + 3 + place, c3.to(tl.int64))
