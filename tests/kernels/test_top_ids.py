"""The ids of a row's largest logits, which drafters learn from: the same set in the same order from every backend."""

from __future__ import annotations

import pytest
import torch
from specserve_kernels import Ops

SHAPES = [(1, 8), (2, 9), (3, 63), (3, 64), (2, 65), (5, 1000), (2, 49_153)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 8])
def test_best_first(ops: Ops, shape: tuple[int, int], count: int) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e3
    wanted = torch.tensor(
        [sorted(range(shape[1]), key=row.__getitem__, reverse=True)[:count] for row in logits.tolist()]
    )
    assert torch.equal(ops.top_ids(logits, count), wanted)


def test_infinities_and_the_last_column(ops: Ops) -> None:
    logits = torch.full((2, 130), -torch.inf)
    logits[0, 129], logits[0, 64], logits[1, 0] = 1.0, torch.inf, -5.0
    found = ops.top_ids(logits, 2)
    assert found[0].tolist() == [64, 129] and int(found[1, 0]) == 0
    assert len(set(found[1].tolist())) == 2
