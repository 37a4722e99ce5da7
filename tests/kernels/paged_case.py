"""Backends to test, and a paged attention call in miniature: shuffled pages, free ones among them, poisoned slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import specserve_kernels
import torch
from specserve_kernels import AttentionRows, Ops
from torch import Tensor


def load_or_skip(backend: str) -> Ops:
    """A backend; the test is skipped, with its reason, where it cannot be loaded."""
    try:
        return specserve_kernels.load(backend)
    except specserve_kernels.BackendUnavailable as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Row:
    """One query: the first `prefix` slots of a sequence, then the slots of `tail`."""

    sequence: int
    prefix: int
    tail: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention call."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int


@dataclass(frozen=True)
class PagedCase:
    """Queries, caches and rows of one attention call; `where` gives page and offset of a sequence's slot."""

    shape: Shape
    rows: list[Row]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor

    def run(self, ops: Ops) -> Tensor:
        """The attention of all rows."""
        return ops.attention(self.q, self.k_cache, self.v_cache, self.attention_rows(), self.shape.dim**-0.5)

    def attention_rows(self) -> AttentionRows:
        """The rows as the op takes them, tails padded with slots that are no slots."""
        depth = max((len(row.tail) for row in self.rows), default=0)
        tails = [[*row.tail, *[2**31 - 1] * (depth - len(row.tail))] for row in self.rows]
        return AttentionRows(
            sequence=_int32([row.sequence for row in self.rows]),
            prefix_len=_int32([row.prefix for row in self.rows]),
            tail_slots=_int32(tails).reshape(len(self.rows), depth),
            tail_len=_int32([len(row.tail) for row in self.rows]),
            page_table=self.page_table,
        )

    def where(self, sequence: int, slot: int) -> tuple[int, int]:
        """Page and offset of a slot."""
        return int(self.page_table[sequence, slot // self.shape.page_size]), slot % self.shape.page_size

    def select(self, indices: list[int]) -> PagedCase:
        """The same caches, some of the rows."""
        return replace(self, rows=[self.rows[index] for index in indices], q=self.q[indices].clone())

    def poisoned(self, poison: float, hidden_from: list[int]) -> PagedCase:
        """A copy that holds `poison` in every slot of every page that none of the rows `hidden_from` sees."""
        seen = torch.zeros(self.k_cache.shape[0], self.shape.page_size, dtype=torch.bool)
        for row in (self.rows[index] for index in hidden_from):
            for slot in [*range(row.prefix), *row.tail]:
                seen[self.where(row.sequence, slot)] = True
        mask = ~seen[:, None, :, None]
        return replace(
            self,
            k_cache=self.k_cache.masked_fill(mask, poison),
            v_cache=self.v_cache.masked_fill(mask, poison),
        )


def _int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def build_case(shape: Shape, rows: list[Row], dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> PagedCase:
    """Makes a case: pages shuffled over the pool, a third of the pool free, table entries past the end invalid."""
    generator = torch.Generator().manual_seed(seed)
    num_sequences = max(row.sequence for row in rows) + 1
    lengths = [0] * num_sequences
    for row in rows:
        lengths[row.sequence] = max(lengths[row.sequence], row.prefix, *[slot + 1 for slot in row.tail])
    used = [-(-length // shape.page_size) for length in lengths]
    pool = sum(used) + sum(used) // 2 + 1
    free = torch.randperm(pool, generator=generator).tolist()
    page_table = torch.full((num_sequences, max(used) + 2), 2**31 - 1, dtype=torch.int32)
    for sequence, count in enumerate(used):
        page_table[sequence, :count] = _int32([free.pop() for _ in range(count)])

    def normal(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * spread).to(dtype)

    cache = (pool, shape.kv_heads, shape.page_size, shape.dim)
    return PagedCase(shape, rows, normal(len(rows), shape.heads, shape.dim), normal(*cache), normal(*cache), page_table)
