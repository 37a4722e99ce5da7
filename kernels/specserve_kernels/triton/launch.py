"""How kernels are started, and every constant that they are tuned by.

All kernels go through `start`, so that `recording` can collect the launches of any call instead of making them: the
compile table (compile_table.py) runs the operations on tensors without memory and compiles exactly what they would
have launched. Multiply-adds are never fused by the compiler (`enable_fp_fusion`): one formula then gives one result
in every kernel that holds it; where a kernel wants a fused one it says `tl.fma`.

No constant below has met a GPU: each is marked "not yet measured". None of them changes what is computed in `exact`
numerics except the ones named EXACT_, which are part of the definition and must not depend on load or shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Triton's interpreter was chosen before this package was imported: kernels run on CPU tensors, op by op.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Attention: query rows of one tile (rows of a sequence × query heads of one kv head), of heads up to 64 and of wider
# ones, as many as spill nothing. fp32 products take no tensor core and hold everything in registers. not yet measured
EXACT_TILE = 64
FP32_TILE, FP32_TILE_WIDE = 16, 8
FAST_TILE_SMALL = 16
FAST_TILE_LARGE, FAST_TILE_WIDE = 64, 32
# Positions of one split. Exact: part of the definition, a multiple of every block below. not yet measured
EXACT_SPLIT = 256
# Fast: the fewest keys of a split, and how many programs fill a device (132 SMs × 2). not yet measured
FAST_SPLIT_MIN = 128
FAST_PROGRAMS = 264
# By padded head size: keys of one block, and warps. The largest that spill nothing anywhere; not yet measured
EXACT_BLOCK = {16: (64, 8), 32: (64, 8), 64: (32, 4), 128: (32, 8), 256: (16, 8)}
FAST_BLOCK = {16: (64, 8), 32: (64, 8), 64: (32, 4), 128: (32, 4), 256: (16, 8)}
FP32_BLOCK = {16: (16, 8), 32: (32, 8), 64: (16, 8), 128: (16, 8), 256: (8, 8)}
ATTENTION_STAGES = 2  # not yet measured
# Partial results of exact attention that may exist at once; rows beyond are done in a second launch. not yet measured
ATTENTION_WORKSPACE_BYTES = 256 << 20
MERGE_SPLITS = 8  # partial results read at once; part of the definition of the merge. not yet measured
MERGE_WARPS = 2  # not yet measured

# GEMM: one tile for every number of rows; outputs per program by the weight's number of outputs. not yet measured
EXACT_GEMM_ROWS = 32
EXACT_GEMM_DEPTH = 64
GEMM_WIDE_OUT = 8192  # from here on GEMM_OUT_WIDE outputs a program, below it GEMM_OUT_NARROW
GEMM_OUT_WIDE = 64
GEMM_OUT_NARROW = 32
GEMM_WARPS = 4  # not yet measured
GEMM_STAGES = 4  # not yet measured

# Elementwise and row kernels: values a program holds at once. not yet measured
NORM_BLOCK = 2048
ELEMENT_BLOCK = 1024
ROW_WARPS = 4
ROPE_HEADS = 8  # heads that one program rotates
HEAD_WARPS = 1  # of a program that has one head of one row
# Slots that one launch of move_kv holds in registers; more go through a staging buffer. not yet measured
MOVE_SLOTS = 128
MOVE_DIM = 32
# Sampling: logits of its row that a program looks at together, in `sample` and in `top_ids`. not yet measured
SAMPLE_BLOCK = 4096
TOP_BLOCK = 4096
SAMPLE_WARPS = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: `arguments` in the kernel's order, then its compile-time `constants`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


_recorded: list[list[Launch]] = []


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, `start` appends to the list that this yields and launches nothing."""
    launches: list[Launch] = []
    _recorded.append(launches)
    try:
        yield launches
    finally:
        _recorded.remove(launches)


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 2, **constants: Any) -> None:
    """Launch a kernel on the current stream; an empty grid is no launch. The usual stages: not yet measured."""
    if 0 in grid:
        return
    if _recorded:
        _recorded[-1].append(Launch(kernel, grid, arguments, constants, warps, stages))
        return
    kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def padded(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`: Triton's blocks have no other sizes."""
    return max(least, 1 << (size - 1).bit_length())
