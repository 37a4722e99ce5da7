"""Tree attention in Triton against fp64, in both numerics: pages, splits, trees, windows, fp8, and poison.

The quick cells are few, and any two choices meet in one of them; the whole matrix is slow. Bits are compared where
`exact` promises them: alone, in company, in a shared tile, as node or chain.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from triton_case import EXACT, FAST, bits, normal, tiled  # first: it chooses the interpreter

# isort: split
from cells import pairwise
from paged_case import PagedCase, Row, Shape, build_case
from specserve_kernels.triton.tree_attention import FP32_OVER_FP8
from torch import Tensor

# sequence 0: a chunk; 1: a root and its tree, deep and wide; 2: a tail across the edge of a split; 3: one token
CHUNK = [Row(0, position + 1) for position in range(14, 17)]
TREE = [Row(1, 21), *[Row(1, 21, tail) for tail in [(21,), (22, 30, 84, 40), (23, *range(50, 62))]]]
ACROSS = [Row(2, 250), Row(2, 250, tuple(range(290, 280, -1)))]
ROWS, COUNTS = [*CHUNK, *TREE, *ACROSS, Row(3, 1)], [3, 4, 2, 1]
# the same without the long past, for tests that run many times
FEW, FEW_COUNTS = [*CHUNK, *TREE], [3, 4]
# what a quick cell asks for, each with a row that sees more than a window of 70: rows, and the lengths of their runs
ROW_KINDS: dict[str, tuple[list[Row], list[int]]] = {
    "single": ([Row(0, 75), Row(1, 3)], [1, 1]),
    "chunk": ([Row(0, position + 1) for position in range(71, 74)], [3]),
    "tree": ([Row(0, 71), Row(0, 71, (71,)), Row(0, 71, (72, 134, 80))], [3]),
    "mix": (ROWS, COUNTS),
}
# 64 nodes, the most of a tree: one path through all of their slots in no order, and children of one root
PATH = tuple(30 + (37 * node + 5) % 64 for node in range(64))
DEEP = [Row(0, 30), *[Row(0, 30, PATH[: depth + 1]) for depth in range(64)]]
WIDE = [Row(0, 30), *[Row(0, 30, (slot,)) for slot in PATH]]


@dataclass(frozen=True)
class Setup:
    """One configuration of attention."""

    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    exact: bool = True
    planned: bool = True
    window: int = 0
    fp8: bool = False

    @property
    def refused(self) -> bool:
        """What the kernels spill whatever their tile."""
        return self.shape.dim > FP32_OVER_FP8 and self.dtype is torch.float32 and self.fp8

    def __str__(self) -> str:
        kind = f"{str(self.dtype)[6:]}{'-e4m3' if self.fp8 else ''}-{'exact' if self.exact else 'fast'}"
        shape = f"{self.shape.heads}/{self.shape.kv_heads}x{self.shape.dim}-page{self.shape.page_size}"
        return f"{shape}-{kind}{'' if self.planned else '-unplanned'}{f'-window{self.window}' if self.window else ''}"

    def build(
        self, rows: list[Row] = ROWS, spread: float = 1.0, poisoned: bool = False
    ) -> tuple[PagedCase, Tensor | None]:
        """A case and the scales of its cache; `poisoned`: NaN wherever no row looks."""
        case = build_case(self.shape, rows, self.dtype, spread=spread)
        if poisoned:
            case = case.poisoned(math.nan, list(range(len(rows))))
        if not self.fp8:
            return case, None
        scales = normal(2, self.shape.kv_heads, seed=5).abs() * 0.3 + 0.2
        caches = (case.k_cache, case.v_cache)
        k, v = ((cache / scale[:, None, None]) for cache, scale in zip(caches, scales, strict=True))
        k, v = (cache.float().clamp(-448, 448).to(torch.float8_e4m3fn) for cache in (k, v))
        return replace(case, k_cache=k, v_cache=v), scales

    def run(self, case: PagedCase, scales: Tensor | None = None, counts: list[int] | None = COUNTS) -> Tensor:
        """The kernel's answer, in shared tiles if planned."""
        ops = replace(EXACT if self.exact else FAST, window=self.window)
        rows = case.attention_rows()
        if self.planned and counts:
            rows = tiled(rows, counts, self.shape.heads // self.shape.kv_heads, self.shape.dim, self.dtype)
        scale = self.shape.dim**-0.5
        return ops.attention(case.q, case.k_cache, case.v_cache, rows, scale, scales)


def expected(case: PagedCase, window: int, scales: Tensor | None) -> Tensor:
    """The definition in fp64, row by row and head by head."""
    group, out = case.shape.heads // case.shape.kv_heads, torch.empty(case.q.shape, dtype=torch.float64)
    k_cache, v_cache = (cache.float().double() for cache in (case.k_cache, case.v_cache))
    for index, row in enumerate(case.rows):
        slots = [*range(row.prefix), *row.tail][-window if window else 0 :]
        places = [case.where(row.sequence, slot) for slot in slots]
        for head in range(case.shape.heads):
            kv_head = head // group
            k_scale, v_scale = (1.0, 1.0) if scales is None else scales[:, kv_head].double()
            keys = torch.stack([k_cache[page, kv_head, offset] for page, offset in places]) * k_scale
            values = torch.stack([v_cache[page, kv_head, offset] for page, offset in places]) * v_scale
            weights = torch.softmax(keys @ case.q[index, head].double() * case.shape.dim**-0.5, 0)
            out[index, head] = weights @ values
    return out


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Within the rounding of weights and results to the type."""
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=2 * unit + 1e-6, atol=unit + 2e-6)


# What a quick cell chooses, by name; heads come as query heads, kv heads and their size.
CHOICES: tuple[dict[str, Any], ...] = (
    {"exact": True, "fast": False},
    {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32},
    {"plain": False, "e4m3": True},
    {"page16": 16, "page32": 32, "page64": 64},
    {"4/2x64": (4, 2, 64), "3/1x80": (3, 1, 80), "2/2x96": (2, 2, 96), "2/1x128": (2, 1, 128), "5/1x256": (5, 1, 256)},
    {"unlimited": 0, "window70": 70},
    ROW_KINDS,
)


def setup_of(cell: tuple[str, ...]) -> Setup:
    """A quick cell without its rows."""
    exact, dtype, fp8, page, heads, window = (choices[name] for choices, name in zip(CHOICES[:-1], cell, strict=False))
    return Setup(Shape(*heads, page), dtype, exact, window=window, fp8=fp8)


QUICK = pairwise([cell for cell in itertools.product(*CHOICES) if not setup_of(cell).refused])
# a head size that is no multiple of 16, windows narrower than a block, and rows without a plan, which are always exact
ODD = [
    Setup(Shape(5, 1, 20, 16), dtype=torch.float32, exact=False),
    Setup(Shape(3, 1, 96, 64), dtype=torch.float32, planned=False, window=5),
    Setup(Shape(2, 2, 128, 16), fp8=True, window=33),
    Setup(Shape(2, 1, 256, 32), dtype=torch.float16, exact=False, planned=False, fp8=True),
]
PAIRS = [
    (heads, dim, page) for heads in [(2, 2), (6, 2), (8, 1)] for dim in [64, 80, 96, 128, 256] for page in [16, 32, 64]
]
KINDS = list(
    itertools.product(
        [torch.bfloat16, torch.float16, torch.float32], [True, False], [True, False], [0, 70], [False, True]
    )
)
# every kind meets every sixth shape, every shape every sixth kind
WHOLE = [
    setup
    for (a, (heads, dim, page)), (b, kind) in itertools.product(enumerate(PAIRS), enumerate(KINDS))
    if (a + b) % 6 == 0 and not (setup := Setup(Shape(*heads, dim, page), *kind)).refused
]


def check(setup: Setup, rows: list[Row] = ROWS, counts: list[int] = COUNTS) -> None:
    case, scales = setup.build(rows, poisoned=True)
    assert_close(setup.run(case, scales, counts), expected(case, setup.window, scales))


@pytest.mark.parametrize("cell", QUICK, ids="-".join)
def test_agrees_with_fp64(cell: tuple[str, ...]) -> None:
    check(setup_of(cell), *ROW_KINDS[cell[-1]])


def test_any_two_choices_meet_in_a_quick_cell() -> None:
    for (a, some), (b, others) in itertools.combinations(enumerate(CHOICES), 2):
        assert {(cell[a], cell[b]) for cell in QUICK} == set(itertools.product(some, others))


@pytest.mark.parametrize("setup", ODD, ids=str)
def test_what_no_cell_has(setup: Setup) -> None:
    check(setup)


def test_fp32_over_fp8_has_no_wide_heads() -> None:
    with pytest.raises(ValueError, match="heads of at most 128, not 256"):
        check(Setup(Shape(2, 1, 256, 16), torch.float32, fp8=True))


@pytest.mark.slow
@pytest.mark.parametrize("setup", WHOLE, ids=str)
def test_agrees_with_fp64_everywhere(setup: Setup) -> None:
    check(setup)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("tree", [DEEP, WIDE], ids=["deep", "wide"])
def test_trees_of_64_nodes(tree: list[Row], exact: bool) -> None:
    check(Setup(Shape(2, 1, 64, 16), torch.float16, exact), tree, [len(tree)])


@pytest.mark.parametrize("exact", [True, False])
def test_what_no_row_sees_changes_no_bit(exact: bool) -> None:
    setup = Setup(Shape(4, 2, 64, 16), exact=exact)
    case, _ = setup.build(FEW)
    clean = setup.run(case, counts=FEW_COUNTS)
    nothing_seen = case.poisoned(math.nan, list(range(len(FEW))))
    assert torch.equal(bits(setup.run(nothing_seen, counts=FEW_COUNTS)), bits(clean))
    # what one row does not see does not change that row, though others of its tile do see it
    kept = [0, 5]
    poisoned = setup.run(case.poisoned(math.nan, kept), counts=FEW_COUNTS)
    assert torch.equal(bits(poisoned[kept]), bits(clean[kept])) and poisoned[[2, 4]].isnan().any()


def test_a_visible_nan_is_not_lost() -> None:
    rows = [Row(0, 40), Row(0, 41), Row(0, 20, (40,))]
    for setup in (Setup(Shape(4, 2, 64, 16)), Setup(Shape(4, 2, 64, 16), exact=False)):
        case, _ = setup.build(rows)
        page, offset = case.where(0, 40)
        case.v_cache[page, :, offset] = math.nan
        out = setup.run(case, counts=[3])
        assert out[0].isfinite().all() and out[1].isnan().all() and out[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_rows_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    planned, alone = Setup(Shape(4, 2, 64, 16), dtype), Setup(Shape(4, 2, 64, 16), dtype, planned=False)
    case, _ = planned.build()
    together = planned.run(case)
    assert torch.equal(bits(alone.run(case)), bits(together))
    for chosen, counts in [([0], [1]), ([6, 5, 3], [3]), ([6], [1]), ([8, 9], [1, 1])]:
        assert torch.equal(bits(planned.run(case.select(chosen), counts=counts)), bits(together[chosen]))


@pytest.mark.parametrize("prefix", [5, 32, 250, 256])
def test_a_tree_node_has_the_bits_of_the_chain_it_stands_for(prefix: int) -> None:
    tail = (3, 17, 4, 9, 30, 12, 8, 25, 31, 20)
    rows = [Row(0, prefix + len(tail)), Row(0, prefix + 1), Row(1, prefix, tuple(prefix + slot for slot in tail))]
    setup = Setup(Shape(4, 2, 64, 16))
    case, _ = setup.build(rows)
    for position in range(prefix + len(tail)):
        source = position if position < prefix else prefix + tail[position - prefix]
        (from_page, from_offset), (to_page, to_offset) = case.where(1, source), case.where(0, position)
        for cache in (case.k_cache, case.v_cache):
            cache[to_page, :, to_offset] = cache[from_page, :, from_offset]
    case.q[2] = case.q[0]
    out = setup.run(case, counts=[2, 1])
    assert torch.equal(bits(out[2]), bits(out[0]))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("spread", [1e-20, 30.0, 1e4])
def test_huge_and_tiny_values(exact: bool, spread: float) -> None:
    setup = Setup(Shape(2, 1, 64, 16), torch.float32, exact)
    case, _ = setup.build(FEW, spread)
    got, wanted = setup.run(case, counts=FEW_COUNTS), expected(case, 0, None)
    # fp32 scores of this size carry an error of their own: spread² * 8 * 2^-24 moves a weight by that factor
    slack = min(1e-5 + 2**-20 * spread**2, 0.05) if spread < 1e4 else 0.0
    close = torch.isclose(got.double(), wanted, rtol=1e-4, atol=slack * spread)
    assert close.float().mean() > 0.999


@pytest.mark.parametrize(("exact", "planned"), [(True, False), (True, True), (False, True)])
def test_rows_that_see_nothing_give_zeros(exact: bool, planned: bool) -> None:
    setup = Setup(Shape(4, 2, 64, 16), exact=exact, planned=planned)
    case, _ = setup.build([Row(0, 0), Row(0, 300), Row(0, 0)])
    out = setup.run(case, counts=[2, 1])
    assert not out[[0, 2]].any()
    assert_close(out[1:2], expected(case.select([1]), 0, None))
    assert setup.run(case.select([]), counts=[]).shape == (0, 4, 64)


def test_a_small_workspace_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(Shape(4, 2, 64, 16))
    case, _ = setup.build(FEW)
    together = setup.run(case, counts=FEW_COUNTS)
    monkeypatch.setattr("specserve_kernels.triton.tree_attention.ATTENTION_WORKSPACE_BYTES", 1)
    assert torch.equal(bits(setup.run(case, counts=FEW_COUNTS)), bits(together))


def test_fast_trees_need_a_window_as_long_as_they_may_be() -> None:
    setup = Setup(Shape(2, 1, 64, 16), exact=False, window=63)
    case, _ = setup.build()
    with pytest.raises(ValueError, match="at least 64"):
        setup.run(case)


def test_a_pool_beyond_two_to_the_31_elements() -> None:
    pages = 2**31 // (16 * 64) + 2
    cache = torch.empty(pages, 1, 16, 64, dtype=torch.float8_e4m3fn)  # only the page that is touched takes memory
    cache[-1] = normal(1, 16, 64).to(torch.float8_e4m3fn)
    case = PagedCase(
        Shape(2, 1, 64, 16), [Row(0, 16)], normal(1, 2, 64, dtype=torch.float16), cache, cache,
        torch.tensor([[pages - 1]], dtype=torch.int32),
    )  # fmt: skip
    scales = torch.ones(2, 1)
    small = replace(
        case, k_cache=cache[-1:].clone(), v_cache=cache[-1:].clone(), page_table=torch.zeros(1, 1, dtype=torch.int32)
    )
    for setup in (Setup(case.shape, torch.float16, fp8=True), Setup(case.shape, torch.float16, False, fp8=True)):
        assert torch.equal(setup.run(case, scales, [1]), setup.run(small, scales, [1]))
