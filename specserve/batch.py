"""From a plan and its drafts to tensors: flat rows with ids, positions, slots and what each row may see.

Rows of a sequence stand together: pending tokens in order, then draft nodes in tree order. A node of a tree sees the
past and the root as prefix and its path as tail, in path order; a chain only goes on with the prefix (`AttentionRows`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.proposal import DraftTree
from specserve.request import Sequence
from specserve.scheduler import PlannedRows


class Span(NamedTuple):
    """The rows of one sequence: [first, first + num_pending + nodes).

    If it draws, logits of the last pending row and of the nodes start at `first_logit`; if its prompt is reported,
    logits of all pending rows start at `prompt_logit`.
    """

    sequence: Sequence
    num_pending: int
    draws: bool
    tree: DraftTree
    first: int
    first_logit: int
    prompt_logit: int | None

    @property
    def num_rows(self) -> int:
        return self.num_pending + len(self.tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One forward. All int64 but `attention`'s int32; `logit_rows` are the rows whose logits are wanted."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows], pool-wide
    attention: AttentionRows
    logit_rows: Tensor  # [draws]
    spans: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        return len(self.ids)


class _Rows:
    """Columns of the batch while they grow."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.sequence: list[int] = []
        self.prefix_len: list[int] = []
        self.tails: list[SequenceOf[int]] = []
        self.logit_rows: list[int] = []

    def add_span(self, index: int, plan: PlannedRows, tree: DraftTree) -> Span:
        sequence, table = plan.sequence, plan.sequence.table
        start, n, count = table.cached_len, plan.num_pending, plan.num_pending + len(tree)
        first, first_logit = len(self.ids), len(self.logit_rows)
        prompt_logit: int | None = None
        in_prefix = count if tree.is_chain else n
        self.ids += sequence.token_ids[start : start + n]
        self.ids += tree.token_ids
        self.positions += range(start, start + in_prefix)
        self.prefix_len += range(start + 1, start + in_prefix + 1)
        self.tails += [()] * in_prefix
        if in_prefix < count:
            self._add_paths(tree, first=start + n)
        self.sequence += [index] * count
        self.slots += table.slots(start, count)
        if sequence.reports_prompt:
            prompt_logit, first_logit = first_logit, first_logit + n - 1
            self.logit_rows += range(first, first + n)
        elif plan.draws:
            self.logit_rows += range(first + n - 1, len(self.ids))
        return Span(
            sequence=sequence, num_pending=n, draws=plan.draws, tree=tree,
            first=first, first_logit=first_logit, prompt_logit=prompt_logit,
        )  # fmt: skip

    def _add_paths(self, tree: DraftTree, first: int) -> None:
        """Node i is written to the sequence's slot first + i; its tail is its path, itself last."""
        paths: list[SequenceOf[int]] = []
        for i, parent in enumerate(tree.parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), first + i])
        self.positions += [first - 1 + len(path) for path in paths]
        self.prefix_len += [first] * len(tree)
        self.tails += paths


def _padded(lists: SequenceOf[SequenceOf[int]]) -> Tensor:
    """int32 [len(lists), longest], zero-padded."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    padded = np.zeros((len(lists), int(counts.max(initial=0))), np.int32)
    is_set = np.arange(padded.shape[1]) < counts[:, None]
    padded[is_set] = np.fromiter(chain.from_iterable(lists), np.int32, counts.sum())
    return torch.from_numpy(padded)


def _column(values: SequenceOf[int], dtype: type[np.int64 | np.int32] = np.int64) -> Tensor:
    return torch.from_numpy(np.array(values, dtype))


def build(plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree]) -> StepBatch:
    """Lay out one step; `trees[i]` is the draft of `plans[i]`, within its cap."""
    rows = _Rows()
    spans = tuple(rows.add_span(i, plan, tree) for i, (plan, tree) in enumerate(zip(plans, trees, strict=True)))
    attention = AttentionRows(
        sequence=_column(rows.sequence, np.int32),
        prefix_len=_column(rows.prefix_len, np.int32),
        tail_slots=_padded(rows.tails),
        tail_len=_column([len(tail) for tail in rows.tails], np.int32),
        page_table=_padded([span.sequence.table.pages for span in spans]),
    )
    return StepBatch(
        ids=_column(rows.ids),
        positions=_column(rows.positions),
        slots=_column(rows.slots),
        attention=attention,
        logit_rows=_column(rows.logit_rows),
        spans=spans,
    )
