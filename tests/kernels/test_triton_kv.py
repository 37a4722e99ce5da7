"""Paged KV in Triton: what lands where, the fused write's bits, e4m3 codes, and moves that read before they write."""

from __future__ import annotations

import math

import pytest
import torch
from specserve_kernels import load
from torch import Tensor
from triton_case import EXACT, bits, normal

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
by_type = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
REFERENCE = load("reference")
PAGE, WIDTH = 16, 64
FAR = 2**31 // (PAGE * WIDTH)  # the first page whose offset, in elements, does not fit 32 bits with a sign


def slots_of(kv: Tensor) -> Tensor:
    """[layers, 2, pages, kv_heads, page_size, dim] → [slots, layers, 2, kv_heads, dim]."""
    return kv.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


@by_type
@pytest.mark.parametrize(("page_size", "dim"), [(16, 64), (32, 20), (64, 80), (1, 2)])
def test_write_kv_stores_each_row_at_its_slot_and_nothing_else(dtype: torch.dtype, page_size: int, dim: int) -> None:
    caches = normal(2, 5, 3, page_size, dim, dtype=dtype)
    expected = caches.clone()
    slots = torch.tensor([5 * page_size - 1, 0, 2 * page_size])
    k, v = normal(2, 3, 3, dim, dtype=dtype, seed=1)
    EXACT.write_kv(k, v, caches[0], caches[1], slots)
    REFERENCE.write_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(caches, expected)


def test_a_row_of_padding_is_not_written() -> None:
    caches = normal(2, 2, 3, 16, 20)
    before = caches.clone()
    k, qkv, table = normal(1, 3, 20, seed=1), normal(1, 9 * 20, seed=1), normal(5, 20)
    EXACT.write_kv(k, k, caches[0], caches[1], torch.tensor([-1]))
    EXACT.rope_write_kv(qkv, torch.tensor([0]), table, caches[0], caches[1], torch.tensor([-1]))
    assert torch.equal(caches, before)


@by_type
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 3, 20), (4, 1, 64)])
def test_the_fused_write_has_the_bits_of_rope_and_write(
    dtype: torch.dtype, fp8: bool, heads: int, kv_heads: int, dim: int
) -> None:
    qkv, table = normal(3, (heads + 2 * kv_heads) * dim, dtype=dtype), normal(50, dim, seed=1)
    positions, slots = torch.tensor([0, 49, 7]), torch.tensor([40, 3, 16])
    caches = torch.zeros(4, 3, kv_heads, 16, dim, dtype=torch.float8_e4m3fn if fp8 else dtype)
    scales = normal(2, kv_heads, seed=2).abs() + 0.1 if fp8 else None
    got = EXACT.rope_write_kv(qkv, positions, table, caches[0], caches[1], slots, scales)
    q, k, v = qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], 1)
    assert torch.equal(got, EXACT.rope(q.contiguous(), positions, table))
    rotated = EXACT.rope(k.contiguous(), positions, table)
    EXACT.write_kv(rotated, v.contiguous(), caches[2], caches[3], slots, scales)
    assert torch.equal(bits(caches[0]), bits(caches[2])) and torch.equal(bits(caches[1]), bits(caches[3]))
    assert bits(caches[0]).count_nonzero() > 0


def test_fp8_codes_are_the_nearest_values() -> None:
    edges = [0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 2**-9, 2**-10, 2**-6]
    halfway = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = halfway[halfway.isfinite()].sort().values
    x = torch.cat((torch.tensor(edges), (halfway[1:] + halfway[:-1]) / 2, halfway, normal(735, spread=10.0)))
    x = x[: x.numel() // 16 * 16].reshape(-1, 1, 16).contiguous()
    cache = torch.zeros(2, x.shape[0], 1, 1, 16, dtype=torch.float8_e4m3fn)
    EXACT.write_kv(x, x, cache[0], cache[1], torch.arange(x.shape[0]), torch.ones(2, 1))
    expected = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(cache[0].float().reshape(expected.shape), expected, rtol=0, atol=0, equal_nan=True)


def test_scales_go_with_fp8() -> None:
    k, cache = normal(1, 1, 16), torch.zeros(1, 1, 16, 16)
    with pytest.raises(ValueError, match="scales go with an fp8 cache"):
        EXACT.write_kv(k, k, cache, cache, torch.tensor([0]), torch.ones(2, 1))
    with pytest.raises(ValueError, match="scales go with an fp8 cache"):
        EXACT.write_kv(k, k, cache.to(torch.float8_e4m3fn), cache.to(torch.float8_e4m3fn), torch.tensor([0]))


MOVES: list[tuple[list[int], list[int]]] = [
    ([22, 23], [21, 22]),
    ([23, 22], [22, 21]),
    ([5, 6], [6, 5]),
    ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]),
    ([40, 15, 16], [15, 16, 47]),
    ([8, 8], [10, 33]),
    ([], []),
    ([*range(150)], [*range(1, 151)]),  # more than one launch holds
]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=[str(len(move[0])) for move in MOVES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_move_kv_reads_every_source_first(dtype: torch.dtype, source: list[int], target: list[int]) -> None:
    kv = normal(2, 2, 10, 2, 16, 36).to(dtype)
    kv[:, :, 0, :, 5] = math.nan
    before = bits(slots_of(kv)).clone()
    expected = before.clone()
    expected[target] = before[source]
    EXACT.move_kv(kv, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    assert torch.equal(bits(slots_of(kv)), expected)


def far_and_near(*planes: int) -> tuple[Tensor, Tensor]:
    """A pool of codes that is used in pages 0 and FAR alone, all that takes memory, and a pool of just those two."""
    far = torch.empty(*planes, FAR + 1, 1, PAGE, WIDTH, dtype=torch.uint8)
    near = bits(normal(*planes, 2, 1, PAGE, WIDTH).to(torch.float8_e4m3fn))
    far[..., [0, FAR], :, :, :] = near
    return far, near


@pytest.mark.parametrize("fused", [False, True], ids=["write_kv", "rope_write_kv"])
def test_writes_beyond_two_to_the_31_elements(fused: bool) -> None:
    far, near = far_and_near(2)
    before, scales = near.clone(), torch.ones(2, 1)
    k, qkv, table = normal(2, 1, WIDTH, seed=1), normal(2, 3 * WIDTH, seed=2), normal(5, WIDTH, seed=3)
    for pool, page in ((far, FAR), (near, 1)):
        slots = torch.tensor([7, page * PAGE + 9])
        if fused:
            EXACT.rope_write_kv(qkv, torch.tensor([3, 4]), table, pool[0], pool[1], slots, scales)
        else:
            EXACT.write_kv(k, k, pool[0], pool[1], slots, scales)
    assert torch.equal(far[:, [0, FAR]], near)
    assert (near != before).any(-1).sum() == 4  # two rows of K and two of V


@pytest.mark.parametrize("at_once", [2, 1], ids=["one launch", "two launches"])
def test_moves_beyond_two_to_the_31_elements(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first page to the last and back; V's plane begins beyond 2^31 elements as well."""
    monkeypatch.setattr("specserve_kernels.triton.kv.MOVE_SLOTS", at_once)
    far, near = far_and_near(1, 2)
    before = near.clone()
    for pool, page in ((far, FAR), (near, 1)):
        here, there = 7, page * PAGE + 9
        EXACT.move_kv(pool, torch.tensor([here, there]), torch.tensor([there, here]))
    assert torch.equal(far[:, :, [0, FAR]], near)
    assert torch.equal(near[0, :, 1, 0, 9], before[0, :, 0, 0, 7])
    assert torch.equal(near[0, :, 0, 0, 7], before[0, :, 1, 0, 9])
