"""Writing and moving slots of the paged cache: what lands where, and that moves read before they write."""

from __future__ import annotations

import math

import pytest
import torch
from paged_case import load_or_skip
from specserve_kernels import AttentionRows, Ops, load
from torch import Tensor

PAGE = 16


def slots_of(kv: Tensor) -> Tensor:
    """[layers, 2, pages, kv_heads, page_size, dim] → [slots, layers, 2, kv_heads, dim]."""
    return kv.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_write_kv_stores_each_row_at_its_slot_and_nothing_else(ops: Ops, dtype: torch.dtype, page_size: int) -> None:
    caches = torch.randn(2, 5, 3, page_size, 20).to(dtype)
    expected = caches.clone()
    slots = torch.randperm(5 * page_size)[: min(7, 5 * page_size)]
    k, v = torch.randn(2, slots.shape[0], 3, 20).to(dtype)
    ops.write_kv(k, v, caches[0], caches[1], slots)
    load("reference").write_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(caches, expected)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(caches[0, slot // page_size, :, slot % page_size], k[row])
        assert torch.equal(caches[1, slot // page_size, :, slot % page_size], v[row])


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (5, 5, 20), (4, 1, 2)])
def test_the_fused_write_has_the_bits_of_rope_and_write(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    ops = load_or_skip(backend)
    qkv, table = torch.randn(3, (heads + 2 * kv_heads) * dim).to(dtype), torch.randn(50, dim)
    positions, slots = torch.tensor([0, 49, 7]), torch.tensor([40, 3, 16])
    caches, expected = torch.zeros(2, 2, 3, kv_heads, PAGE, dim, dtype=dtype)
    got = ops.rope_write_kv(qkv, positions, table, caches[0], caches[1], slots)
    q, k, v = (part.contiguous() for part in qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], 1))
    ops.write_kv(ops.rope(k, positions, table), v, expected[0], expected[1], slots)
    assert torch.equal(caches, expected) and caches.count_nonzero() > 0
    assert torch.equal(got, ops.rope(q, positions, table))


def test_the_reference_stores_e4m3_and_leaves_out_padding() -> None:
    reference = load("reference")
    caches = torch.zeros(2, 2, 1, PAGE, 2, dtype=torch.float8_e4m3fn)
    k = torch.tensor([[[1.0, 1000.0]], [[5.0, 6.0]]])
    scales = torch.tensor([[0.5], [2.0]])
    reference.write_kv(k, k, caches[0], caches[1], torch.tensor([17, -1]), scales)
    assert caches[0, 1, 0, 1].tolist() == [2.0, 448.0] and caches[1, 1, 0, 1].tolist() == [0.5, 448.0]
    assert caches.float().count_nonzero() == 4
    rows = AttentionRows(
        *(torch.tensor([n], dtype=torch.int32) for n in (0, 2)),
        torch.zeros(1, 0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32),
    )
    q = torch.tensor([[[1.0, 0.0]]])
    weight = math.exp(2.0 * 0.5)  # of slot 1; slot 0 holds zeros
    both = reference.attention(q, caches[0], caches[1], rows, 1.0, scales)
    assert both[0, 0, 0].item() == pytest.approx(0.5 * 2.0 * weight / (1 + weight))
    assert reference.attention(q, caches[0], caches[1], rows, 1.0, scales, window=1)[0, 0].tolist() == [1.0, 896.0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([22, 23], [21, 22]),
        ([23, 22], [22, 21]),
        ([5, 6], [6, 5]),
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]),
        ([40, 15, 16], [15, 16, 47]),
        ([9], [9]),
        ([8, 8], [10, 33]),
        ([], []),
    ],
)
def test_move_kv_reads_every_source_first(ops: Ops, dtype: torch.dtype, source: list[int], target: list[int]) -> None:
    kv = torch.randn(3, 2, 3, 2, PAGE, 20).to(dtype)
    before = slots_of(kv).clone()
    expected = before.clone()
    expected[target] = before[source]
    ops.move_kv(kv, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    assert torch.equal(slots_of(kv), expected)


def test_a_moved_nan_does_not_spread(ops: Ops) -> None:
    kv = torch.ones(1, 2, 1, 1, PAGE, 4)
    kv[..., 3, :] = float("nan")
    ops.move_kv(kv, torch.tensor([3]), torch.tensor([7]))
    assert slots_of(kv).isnan().all(-1).sum() == 4
    assert slots_of(kv)[7].isnan().all()
