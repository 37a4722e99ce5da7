"""The exactness rule, op by op: a row has the same bits alone, among 1 … 64 rows, at every index, whoever is beside it.

Each op gets a pool of 64 rows. The bits of each, computed alone, are compared with its bits in batches of every size,
shifted so that rows meet many indices; then again, in some sizes, with every other row replaced by random, huge or
NaN neighbours. One thread tries all sizes; three threads, which is where libraries split their sums, a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from paged_case import Row, Shape, build_case
from specserve_kernels import Ops
from torch import Tensor

pytestmark = pytest.mark.parametrize("threads", [1, 3], indirect=True)

POOL = 64
FEW = (1, 2, 15, 16, 17, 31, 32, 33, 64)
Apply = Callable[[Tensor, list[int]], Tensor]  # rows, and which of the pool they are


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random values of one type."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bits as integers: NaN equals itself, and −0 is not +0."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def neighbours(pool: Tensor) -> list[Tensor | None]:
    """What stands in for the other rows: nothing, random values, huge ones, infinities, NaN."""
    values = (torch.finfo(pool.dtype).max, math.inf, math.nan)
    return [None, normal(*pool.shape, dtype=pool.dtype, seed=9), *(torch.full_like(pool, value) for value in values)]


def assert_rows_do_not_see_each_other(pool: Tensor, apply: Apply, sizes: Iterable[int] = range(1, POOL + 1)) -> None:
    """Compare each row's bits alone with its bits in company."""
    alone = bits(torch.cat([apply(pool[index : index + 1].clone(), [index]) for index in range(POOL)]))
    for strangers in neighbours(pool):
        for size in sizes:
            if strangers is not None and size not in FEW:
                continue
            chosen = [(size + index) % POOL for index in range(size)]
            kept = range(size) if strangers is None else range(size % 2, size, 2)
            batch = pool[chosen].clone()
            if strangers is not None:
                others = [index for index in range(size) if index not in kept]
                batch[others] = strangers[others]
            got = bits(apply(batch, chosen))
            for index in kept:
                assert torch.equal(got[index], alone[chosen[index]]), f"row {index} of {size}"


@pytest.mark.parametrize(
    ("width", "out", "sizes"),
    [
        (576, 960, range(1, 65)),
        (576, 576, FEW),
        (576, 3072, FEW),
        (1536, 576, range(1, 65)),
        (33, 7, range(1, 65)),
        (129, 65, range(1, 65)),
        (2050, 3, FEW),
    ],
)
def test_linear(ops: Ops, dtype: torch.dtype, width: int, out: int, sizes: Iterable[int]) -> None:
    weight = ops.pack_linear(normal(out, width, dtype=dtype, seed=1) * 0.05)
    pool = normal(POOL, width, dtype=dtype)
    assert_rows_do_not_see_each_other(pool, lambda x, _: ops.linear(x, weight), sizes)


def test_linear_of_the_output_layer(ops: Ops, dtype: torch.dtype) -> None:
    weight = ops.pack_linear(normal(49152, 576, dtype=dtype, seed=1) * 0.05)
    pool = normal(POOL, 576, dtype=dtype)
    together = bits(ops.linear(pool, weight, torch.float32))
    for first, size in ((0, 1), (40, 1), (3, 2), (7, 17), (20, 33)):
        rows = pool[first : first + size].clone()
        assert torch.equal(bits(ops.linear(rows, weight, torch.float32)), together[first : first + size])


def test_embed(ops: Ops, dtype: torch.dtype) -> None:
    weight = ops.pack_linear(normal(POOL, 33, dtype=dtype))
    ids = torch.arange(POOL)
    alone = torch.cat([ops.embed(ids[index : index + 1], weight) for index in range(POOL)])
    for size in range(1, POOL + 1):
        assert torch.equal(bits(ops.embed(ids[-size:], weight)), bits(alone[-size:]))


@pytest.mark.parametrize("width", [576, 13, 577, 2048, 40001])  # ATen splits a lone sum from 32,768 terms on
def test_rms_norm(ops: Ops, dtype: torch.dtype, width: int) -> None:
    weight = normal(width, dtype=dtype, seed=1)
    pool = normal(POOL, width, dtype=dtype)
    assert_rows_do_not_see_each_other(
        pool, lambda x, _: ops.rms_norm(x, weight, 1e-5), FEW if width > 4096 else range(1, 65)
    )


@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (3, 64), (5, 20)])
def test_rope(ops: Ops, dtype: torch.dtype, heads: int, dim: int) -> None:
    angles = torch.outer(torch.arange(300.0), 1e4 ** -(torch.arange(dim // 2) * 2 / dim))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.arange(POOL) * 3
    pool = normal(POOL, heads, dim, dtype=dtype)
    assert_rows_do_not_see_each_other(pool, lambda x, chosen: ops.rope(x, positions[chosen], table))


@pytest.mark.parametrize("inner", [1536, 7, 33, 515])
def test_silu_mul(ops: Ops, dtype: torch.dtype, inner: int) -> None:
    pool = normal(POOL, 2 * inner, dtype=dtype) * 4
    assert_rows_do_not_see_each_other(pool, lambda x, _: ops.silu_mul(x))


def attention_pool() -> list[Row]:
    """64 rows: a chunk, a tree near a split's edge, decodes of all lengths."""
    chunk = [Row(0, position + 1) for position in range(240, 264)]
    tree = [Row(1, 253, tuple(range(260, 260 + depth))) for depth in range(12)]
    wide = [Row(1, 253, (slot,)) for slot in range(275, 283)]
    decode = [Row(2 + index, 1 + 37 * index) for index in range(20)]
    rows = [*chunk, *tree, *wide, *decode]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    return [rows[index] for index in order]


@pytest.mark.parametrize("shape", [Shape(9, 3, 64, 16), Shape(5, 5, 20, 1)], ids=str)
def test_attention(ops: Ops, dtype: torch.dtype, shape: Shape) -> None:
    case = build_case(shape, attention_pool(), dtype)
    sizes = range(1, POOL + 1) if shape.heads == 9 else FEW

    def apply(q: Tensor, chosen: list[int]) -> Tensor:
        some = case.select(chosen)
        some.q.copy_(q)
        return some.run(ops)

    assert_rows_do_not_see_each_other(case.q, apply, sizes)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38, 0.0])
def test_attention_among_sequences_that_hold_poison(ops: Ops, dtype: torch.dtype, poison: float) -> None:
    case = build_case(Shape(9, 3, 64, 16), attention_pool(), dtype)
    alone = [case.select([index]).run(ops)[0] for index in range(POOL)]
    for first in range(0, POOL, 13):
        kept = list(range(first, POOL, 9))
        got = case.poisoned(poison, kept).run(ops)
        for index in kept:
            assert torch.equal(bits(got[index]), bits(alone[index]))


def test_noise(ops: Ops) -> None:
    keys = torch.arange(POOL) * 1234567
    alone = torch.cat([ops.noise(keys[i : i + 1], keys[i : i + 1], keys[i : i + 1] * 0, 0, 1003) for i in range(POOL)])
    for size in range(1, POOL + 1):
        some = keys[-size:]
        assert torch.equal(bits(ops.noise(some, some, some * 0, 0, 1003)), bits(alone[-size:]))
