"""Attention of each backend against fp64, over pages, splits and trees, with poison wherever a row must not look."""

from __future__ import annotations

import math

import pytest
import torch
from paged_case import Row, Shape, build_case
from specserve_kernels import Ops, load

SHAPES = [
    Shape(9, 3, 64, 16),
    Shape(9, 3, 64, 1),
    Shape(4, 4, 16, 32),
    Shape(8, 1, 128, 16),
    Shape(6, 2, 20, 24),
]
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 300, 511, 513]
CHUNK = [Row(0, position + 1) for position in range(60)]
# A root at slot 20 of 21; four siblings, a chain of 40 below one, twelve children below another.
WIDE_AND_DEEP = [
    Row(1, 21),
    *[Row(1, 21, (slot,)) for slot in range(21, 25)],
    *[Row(1, 21, (22, *range(30, 30 + depth + 1))) for depth in range(40)],
    *[Row(1, 21, (24, slot)) for slot in range(80, 92)],
]
# The same across the edges of splits, with slots out of order.
ACROSS = [Row(2, 250, tuple(range(290, 290 - depth, -1))) for depth in range(1, 14)]
DECODE = [Row(3 + index, length) for index, length in enumerate(EDGES)]
ROWS = [*CHUNK, *WIDE_AND_DEEP, *ACROSS, *DECODE]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Half a unit in the last place of bf16 and a little; fp32 sums of some hundred terms."""
    return {"rtol": 2**-7, "atol": 2**-9} if dtype is torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-6}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_fp64(ops: Ops, dtype: torch.dtype, shape: Shape) -> None:
    case = build_case(shape, ROWS[::3], dtype).poisoned(math.nan, list(range(len(ROWS[::3]))))
    torch.testing.assert_close(case.run(ops), case.run(load("reference")), **tolerance(dtype))


@pytest.mark.parametrize("spread", [1e-20, 30.0, 1e4])
def test_agrees_with_fp64_when_one_key_takes_all(ops: Ops, spread: float) -> None:
    case = build_case(SHAPES[0], ROWS[::5], torch.float32, spread=spread)
    expected = case.run(load("reference"))
    # fp32 scores of this size carry an error of their own: spread² * 8 * 2^-24 moves a weight by that factor
    slack = min(1e-5 + 2**-20 * spread**2, 0.05) if spread < 1e4 else 0.0
    close = torch.isclose(case.run(ops), expected, rtol=1e-4, atol=slack * spread)
    assert close.float().mean() > 0.999


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_what_no_row_sees_changes_no_bit(ops: Ops, dtype: torch.dtype, poison: float) -> None:
    case = build_case(SHAPES[0], ROWS, dtype)
    assert torch.equal(case.poisoned(poison, list(range(len(ROWS)))).run(ops), case.run(ops))


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_what_one_row_does_not_see_does_not_change_it(ops: Ops, dtype: torch.dtype, page_size: int) -> None:
    case = build_case(Shape(9, 3, 64, page_size), ROWS, dtype)
    clean = case.run(ops)
    for index in [3, 59, 61, 70, 90, 104, 112, 118, 129, len(ROWS) - 1]:
        poisoned = case.poisoned(math.nan, [index]).run(ops)
        assert torch.equal(poisoned[index], clean[index])


def test_a_visible_nan_is_not_lost(ops: Ops, dtype: torch.dtype) -> None:
    case = build_case(SHAPES[0], [Row(0, 40), Row(0, 41), Row(0, 20, (40,))], dtype)
    page, offset = case.where(0, 40)
    case.v_cache[page, :, offset] = math.nan
    out = case.run(ops)
    assert out[0].isfinite().all() and out[1].isnan().all() and out[2].isnan().all()


@pytest.mark.parametrize("prefix", [5, 16, 120, 127, 128, 250, 255, 256, 500, 511])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tree_node_has_the_bits_of_the_chain_it_stands_for(
    ops: Ops, dtype: torch.dtype, prefix: int, page_size: int
) -> None:
    tail = (3, 17, 4, 9, 30, 12, 8, 25, 31, 20)
    rows = [Row(0, prefix + 40), Row(1, prefix, tuple(prefix + slot for slot in tail)), Row(0, prefix + len(tail))]
    case = build_case(Shape(9, 3, 64, page_size), rows, dtype)
    for position in range(prefix + len(tail)):
        source = position if position < prefix else prefix + tail[position - prefix]
        (from_page, from_offset), (to_page, to_offset) = case.where(1, source), case.where(0, position)
        for cache in (case.k_cache, case.v_cache):
            cache[to_page, :, to_offset] = cache[from_page, :, from_offset]
    case.q[2] = case.q[1]
    out = case.run(ops)
    assert torch.equal(out[1], out[2])


def test_no_rows(ops: Ops) -> None:
    case = build_case(SHAPES[0], [Row(0, 3)], torch.float32)
    empty = case.select([])
    assert empty.run(ops).shape == (0, 9, 64)
