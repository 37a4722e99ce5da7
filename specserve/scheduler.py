"""Who gets rows in the next step: iteration-level batching over one token budget and one page pool.

Order is by rank (priority, arrival, choice) everywhere. A step takes the roots of all running sequences, then
prompt chunks, then what is left for drafts. Growth of a better-ranked sequence preempts the worst-ranked one, drafts
never preempt, and the waiting line is served strictly from its head: so the best-ranked sequence advances in
every step, and all admitted sequences finish once arrivals stop.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from specserve.config import SchedulerConfig
from specserve.pages import Move, PagePool
from specserve.prefix import PrefixIndex
from specserve.request import Sequence

# room that one drafting row may borrow: a root and 64 nodes
DRAFT_RESERVE_SLOTS = 65
DRAFT_RESERVE_SHARE = 0.05


class PlannedRows(NamedTuple):
    """Rows of one sequence: `num_pending` known tokens, then at most `node_cap` draft nodes up to `max_depth` deep.

    `draws`: the pending rows reach the end of `token_ids`, so a token is drawn from the last one.
    """

    sequence: Sequence
    num_pending: int
    draws: bool
    node_cap: int = 0
    max_depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. `copies` are applied before anything is written; `preempted` sequences lost their pages."""

    rows: tuple[PlannedRows, ...]
    copies: tuple[Move, ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]


_rank = attrgetter("rank")


class Scheduler:
    """The waiting line and the running set, both sorted by rank."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        index: PrefixIndex | None,
        max_model_len: int,
        budgets: Callable[[SequenceOf[Sequence], int], SequenceOf[int]],
    ) -> None:
        self.config = config
        self.pool = pool
        self.index = index
        self.max_model_len = max_model_len
        self.budgets = budgets
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)

    def add_fork(self, sequence: Sequence) -> None:
        """A sibling that shares its parent's pages and starts running at once; its seat was counted at admission."""
        bisect.insort(self.running, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state it is, and let its pages go."""
        for line in (self.waiting, self.running):
            if sequence in line:
                line.remove(sequence)
        sequence.table.release()

    def tokens_allowed(self, sequence: Sequence) -> int:
        """How many tokens may still be drawn for it."""
        limit = min(self.max_model_len, self.pool.num_pages * self.pool.page_size)
        if sequence.request.params.max_tokens is not None:
            limit = min(limit, sequence.prompt_len + sequence.request.params.max_tokens)
        return limit - len(sequence.token_ids)

    def plan(self) -> StepPlan:
        """The next step. Deterministic: no clock, no randomness; caps come from `budgets`."""
        preempted: list[Sequence] = []
        copies: list[Move] = []
        pending: dict[Sequence, int] = {}
        tokens = self.config.max_num_batched_tokens
        for sequence in list(self.running):
            if sequence in preempted or sequence.num_pending != 1 or not sequence.has_token:
                continue
            moves = self._reserve_root(sequence, preempted)
            if moves is not None:
                copies += moves
                pending[sequence] = 1
        tokens -= len(pending)
        chunks, admitted = self._plan_chunks(tokens, pending, may_admit=not preempted)
        rows = self._plan_drafts(pending, chunks, tokens - sum(chunks.values()))
        return StepPlan(rows=tuple(rows), copies=tuple(copies), preempted=tuple(preempted), admitted=tuple(admitted))

    def _reserve_root(self, sequence: Sequence, preempted: list[Sequence]) -> list[Move] | None:
        """Reserve one slot, at the cost of cached pages first, then of worse-ranked sequences, itself the last."""
        table = sequence.table
        while (moves := table.try_reserve(1)) is None:
            self._evict_for(table.pages_to_reserve(1))
            if table.pages_to_reserve(1) <= self.pool.num_free:
                continue
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return moves

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.table.release()
        sequence.num_preemptions += 1
        self.add(sequence)

    def _evict_for(self, num_pages: int) -> None:
        if self.index is not None and num_pages > self.pool.num_free:
            self.index.evict(num_pages - self.pool.num_free)

    def _plan_chunks(
        self, tokens: int, pending: dict[Sequence, int], may_admit: bool
    ) -> tuple[dict[Sequence, int], list[Sequence]]:
        """Prompt (and recompute) chunks: of those running first, then of those admitted now."""
        chunks: dict[Sequence, int] = {}
        for sequence in self.running:
            if sequence not in pending and tokens:
                chunks[sequence] = min(sequence.num_pending, tokens)
                tokens -= chunks[sequence]
        admitted: list[Sequence] = []
        while may_admit and self.waiting and tokens:
            sequence = self.waiting[0]
            if tokens < min(self.config.min_chunk, sequence.num_pending) or not self._try_admit(sequence):
                break
            admitted.append(sequence)
            chunks[sequence] = min(sequence.num_pending, tokens)
            tokens -= chunks[sequence]
        for sequence, chunk in chunks.items():
            # the pages were promised at admission
            if sequence.table.try_reserve(chunk) is None:
                raise AssertionError(f"{sequence.sequence_id}: no pages for a chunk that was promised them")
        return chunks, admitted

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give the head of the line a seat and pages for all its known tokens, or change nothing."""
        seats = sum(1 + running.num_siblings for running in self.running)
        if seats + 1 + sequence.num_siblings > self.config.max_num_seqs:
            return False
        table, num_tokens = sequence.table, len(sequence.token_ids)
        keys: list[bytes] = []
        pages: list[int] = []
        if self.index is not None and not sequence.reports_prompt:
            keys, pages = self.index.match(sequence.token_ids, sequence.request.cache_salt)
        table.reopen()
        table.adopt(keys, pages)
        # alone, its prompt is enough; beside others it also needs the pages of its first roots
        tails = sequence.num_siblings + 1 if self.running else 0
        need = self.pool.pages_for(num_tokens) - len(pages) + tails
        if need <= self.pool.num_free + self.pool.num_cached:
            self._evict_for(need)
        if need > self.pool.num_free:
            table.release()
            return False
        if self.index is not None:
            self.index.touch(keys)
        table.promise(num_tokens)
        table.try_reserve(num_tokens - table.cached_len)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = table.cached_len
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)
        return True

    def _plan_drafts(self, pending: dict[Sequence, int], chunks: dict[Sequence, int], tokens: int) -> list[PlannedRows]:
        """Lower the budgets to what tokens, pages and the answer's own end allow (evenly, in rank order)."""
        first_token_waits = any(not sequence.has_token for sequence in chunks)
        depths = {s: max(self.tokens_allowed(s) - 1, 0) for s in pending}
        may_draft = [s for s in pending if depths[s] and not first_token_waits]
        caps = dict.fromkeys(pending, 0)
        caps |= zip(may_draft, self.budgets(may_draft, sum(chunks.values())), strict=True)
        left = sum(1 for cap in caps.values() if cap)
        self._keep_reserve(left)
        rows = []
        for sequence, cap in caps.items():
            if cap:
                cap = self._fit(sequence, min(cap, tokens // left))
                left -= 1
                tokens -= cap
            rows.append(
                PlannedRows(sequence=sequence, num_pending=1, draws=True, node_cap=cap, max_depth=depths[sequence])
            )
        for sequence, chunk in chunks.items():
            rows.append(PlannedRows(sequence=sequence, num_pending=chunk, draws=chunk == sequence.num_pending))
        return rows

    def _keep_reserve(self, num_drafting: int) -> None:
        reserve = num_drafting * self.pool.pages_for(DRAFT_RESERVE_SLOTS)
        self._evict_for(min(reserve, int(self.pool.num_pages * DRAFT_RESERVE_SHARE)))

    def _fit(self, sequence: Sequence, cap: int) -> int:
        """The largest cap whose slots fit into free pages; reserves them."""
        size, table = self.pool.page_size, sequence.table
        room = (len(table.pages) + self.pool.num_free) * size - table.cached_len - 1
        cap = max(min(cap, room), 0)
        if cap and table.try_reserve(1 + cap) is None:
            raise AssertionError(f"{sequence.sequence_id}: {cap} nodes were counted to fit")
        return cap
