"""Writing and moving slots of the paged cache: what lands where, and that moves read before they write."""

from __future__ import annotations

import pytest
import torch
from specserve_kernels import Ops, load
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
