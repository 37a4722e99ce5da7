"""One sequence's pages around a decoder: feeds rows and returns logits, as a runner would."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.models.decoder import Decoder

PAGE_SIZE = 4
NUM_PAGES = 40


@dataclass
class Paged:
    """One sequence over shuffled pages, fed row by row as a runner would."""

    decoder: Decoder
    kv: Tensor = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.decoder.config.kv_shape(NUM_PAGES, PAGE_SIZE)
        self.kv = torch.full(shape, float("nan"), dtype=self.decoder.dtype)
        order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(7))
        self.table = order.to(torch.int32).unsqueeze(0)

    def physical(self, slots: list[int]) -> Tensor:
        return torch.tensor([int(self.table[0, s // PAGE_SIZE]) * PAGE_SIZE + s % PAGE_SIZE for s in slots])

    def chunk(self, ids: list[int], start: int) -> Tensor:
        """Logits of `ids` at slots and positions start, start + 1, …"""
        count = len(ids)
        rows = AttentionRows(
            sequence=torch.zeros(count, dtype=torch.int32),
            prefix_len=torch.arange(start + 1, start + count + 1, dtype=torch.int32),
            tail_slots=torch.zeros(count, 0, dtype=torch.int32),
            tail_len=torch.zeros(count, dtype=torch.int32),
            page_table=self.table,
        )
        return self._logits(ids, list(range(start, start + count)), list(range(start, start + count)), rows)

    def tree(self, ids: list[int], parents: list[int], start: int) -> Tensor:
        """Logits of a root (row 0, parent -1) at slot `start` and its nodes in the slots after it."""
        paths = [self.path(parents, row) for row in range(len(ids))]
        depth = max(len(path) for path in paths)
        tails = [[start + row for row in path] + [0] * (depth - len(path)) for path in paths]
        rows = AttentionRows(
            sequence=torch.zeros(len(ids), dtype=torch.int32),
            prefix_len=torch.full((len(ids),), start + 1, dtype=torch.int32),
            tail_slots=torch.tensor(tails, dtype=torch.int32).reshape(len(ids), depth),
            tail_len=torch.tensor([len(path) for path in paths], dtype=torch.int32),
            page_table=self.table,
        )
        positions = [start + len(path) for path in paths]
        return self._logits(ids, positions, [start + row for row in range(len(ids))], rows)

    @staticmethod
    def path(parents: list[int], row: int) -> list[int]:
        """Rows from below the root down to `row`, without the root."""
        path: list[int] = []
        while row > 0:
            path.insert(0, row)
            row = parents[row]
        return path

    def _logits(self, ids: list[int], positions: list[int], slots: list[int], rows: AttentionRows) -> Tensor:
        hidden = self.decoder.forward(torch.tensor(ids), torch.tensor(positions), self.physical(slots), rows, self.kv)
        return self.decoder.logits(hidden)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert found.isfinite().all()
    return float((found - expected).abs().max())
