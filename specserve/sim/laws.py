"""What must hold whatever happens: told events against what was expected, and the engine's state against itself.

A broken law raises `Violation`. The cheap laws are recounted after every step; rehashing the published pages is
dearer and happens every few steps.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from specserve.engine import Engine
from specserve.errors import Cancelled, DeadlineExceeded, EngineFault, NumericFault
from specserve.events import Delta, Event, Failed, Finished, FinishReason, Started
from specserve.prefix import page_key, root_key
from specserve.request import Request, Sequence
from specserve.sim.guessers import FaultyDrafter
from specserve.sim.hashmodel import STATE_BITS, HashRunner, Violation, extend
from specserve.sim.script import POISON, SALTS

PAGE_CHECK_EVERY = 16  # steps


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was accepted: what it must get (per choice: ids, reason), and what it was told so far."""

    request: Request
    expected: list[tuple[list[int], str]]
    num_told: list[int]
    num_drafted: list[int]
    started: bool = False
    cancelled: bool = False
    failed: bool = False
    finished: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return self.failed or len(self.finished) == self.request.params.n


def require(condition: bool, law: str, what: str) -> None:
    if not condition:
        raise Violation(law, what)


class Ledger:
    """Every accepted request of one engine, and the laws."""

    def __init__(self, engine: Engine, runner: HashRunner, drafters: Mapping[str, FaultyDrafter]) -> None:
        self.asked: dict[str, Asked] = {}
        self.live: dict[str, Asked] = {}  # those that are not over
        self._engine = engine
        self._runner = runner
        self._drafters = drafters
        self._told: Counter[str] = Counter()  # what the engine's own counters must agree with
        self._num_checks = 0

    def accept(self, asked: Asked) -> None:
        self.asked[asked.request.request_id] = self.live[asked.request.request_id] = asked

    def lines(self) -> Iterable[Sequence]:
        return itertools.chain(self._engine.scheduler.waiting, self._engine.scheduler.running)

    # ---- what requests are told

    def take(self, event: Event, began: float, forward_raises: bool) -> None:
        """Check one event of a step that began at `began`."""
        asked = self.asked.get(event.request_id)
        if asked is None or asked.over:
            raise Violation("events", f"{event.request_id} is over or was never accepted, and is told {event}")
        if isinstance(event, Started):
            require(not asked.started, "events", f"{event.request_id} started twice")
            asked.started = True
        elif isinstance(event, Delta):
            self._take_delta(asked, event)
        elif isinstance(event, Finished):
            self._take_finish(asked, event)
        else:
            self._take_failure(asked, event, began, forward_raises)
        if asked.over:
            del self.live[event.request_id]

    def _take_delta(self, asked: Asked, event: Delta) -> None:
        name = f"{event.request_id}/{event.index}"
        require(asked.started and event.index not in asked.finished, "events", f"{name} is told tokens out of turn")
        told, (expected, _) = asked.num_told[event.index], asked.expected[event.index]
        ids = [token.token_id for token in event.tokens]
        wanted = expected[told : told + len(ids)]
        require(ids == wanted, "output", f"{name} got {ids} after {told} tokens; without speculation it is {wanted}")
        asked.num_told[event.index] += len(ids)
        drafted = sum(token.drafted for token in event.tokens)
        asked.num_drafted[event.index] += drafted
        self._told["tokens"] += len(ids)
        self._told["drafted"] += drafted

    def _take_finish(self, asked: Asked, event: Finished) -> None:
        name = f"{event.request_id}/{event.index}"
        require(event.index not in asked.finished, "events", f"{name} finished twice")
        expected, reason = asked.expected[event.index]
        told = asked.num_told[event.index]
        require(
            told == len(expected) and event.reason.value == reason,
            "output",
            f"{name} ended {event.reason.value!r} after {told} tokens; without speculation {reason!r}, {len(expected)}",
        )
        stats, usage = event.speculation, event.usage
        pairs = list(itertools.zip_longest(stats.accepted_per_position, stats.drafted_per_position, fillvalue=0))
        numbers = (
            stats.num_accepted_tokens == sum(accepted for accepted, _ in pairs) == asked.num_drafted[event.index]
            and stats.num_draft_tokens == sum(drafted for _, drafted in pairs)
            and all(accepted <= drafted for accepted, drafted in pairs)
            and stats.num_drafts <= stats.num_steps <= stats.num_committed_tokens < told + 1
            and stats.num_committed_tokens <= stats.num_accepted_tokens + stats.num_steps
        )
        require(numbers, "numbers", f"{name}: {stats} after {asked.num_drafted[event.index]} drafted of {told} tokens")
        lengths = (usage.prompt_tokens, usage.completion_tokens)
        require(lengths == (len(asked.request.prompt_token_ids), told), "numbers", f"{name}: {usage} of {told} tokens")
        asked.finished.add(event.index)
        self._told[event.reason.value] += 1

    def _take_failure(self, asked: Asked, event: Failed, began: float, forward_raises: bool) -> None:
        request, error = asked.request, event.error
        deadline = request.deadline
        struck = request.request_id in self._runner.struck or POISON in request.prompt_token_ids
        deserved = (
            (isinstance(error, Cancelled) and asked.cancelled)
            or (isinstance(error, DeadlineExceeded) and deadline is not None and deadline <= began)
            or (isinstance(error, NumericFault) and struck)
            or (isinstance(error, EngineFault) and forward_raises)
        )
        require(deserved, "faults", f"{event.request_id} failed for no reason of its own: {error!r}")
        asked.failed = True
        aborted = isinstance(error, Cancelled)
        self._told[(FinishReason.ABORT if aborted else FinishReason.ERROR).value] += 1

    # ---- what the engine's state must be after a step

    def check(self, before: set[Sequence], began: float) -> None:
        """All laws of the state; `before` was running when the step began, at time `began`."""
        self._conserved()
        self._in_order(before)
        self._counted()
        for sequence in self.lines():
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= began:
                raise Violation("deadline", f"{sequence.sequence_id} outlived its deadline")
        struck = self._runner.struck.intersection(self.live)
        require(not struck, "faults", f"{struck} had a non-finite row and live on")
        self._num_checks += 1
        if self._num_checks % PAGE_CHECK_EVERY == 0:
            self.check_pages()

    def _conserved(self) -> None:
        pool = self._engine.pool
        try:
            pool.check()
            if self._engine.index is not None:
                self._engine.index.check()
        except AssertionError as error:
            raise Violation("conservation", str(error)) from error
        held = {table for table in pool.tables if table.pages}
        require(held <= {s.table for s in self.lines()}, "conservation", "a table without a sequence holds pages")
        for sequence in self._engine.scheduler.waiting:
            require(not sequence.table.pages, "conservation", f"{sequence.sequence_id} waits and holds pages")
        for sequence in self._engine.scheduler.running:
            table = sequence.table
            wanted = pool.pages_for(max(table.cached_len, table.promised_len))
            if len(table.pages) != wanted or sequence.num_pending < 1:
                what = f"{len(table.pages)} pages and {sequence.num_pending} tokens pending; {wanted} pages are needed"
                raise Violation("lookahead", f"{sequence.sequence_id} has {what}")
        drafting = {sequence_id for drafter in self._drafters.values() for sequence_id in drafter.live}
        ended = drafting.difference(sequence.sequence_id for sequence in self.lines()) if drafting else None
        require(not ended, "drafters", f"they hold state of {ended}")
        for drafter in self._drafters.values():
            require(drafter.complaint is None, "drafters", f"{drafter.name} was {drafter.complaint}")

    def _in_order(self, before: set[Sequence]) -> None:
        """First come, first served inside a class; whoever was admitted now was the head of the whole line."""
        scheduler = self._engine.scheduler
        seats = sum(1 + sequence.num_siblings for sequence in scheduler.running)
        require(seats <= scheduler.config.max_num_seqs, "seats", f"{seats} of {scheduler.config.max_num_seqs}")
        untouched: dict[int, int] = {}
        for sequence in scheduler.waiting:
            if sequence.cached_tokens is None:
                priority = sequence.request.priority
                untouched[priority] = min(sequence.arrival, untouched.get(priority, sequence.arrival))
        head = min((sequence.rank for sequence in scheduler.waiting), default=None)
        for sequence in scheduler.running:
            first = untouched.get(sequence.request.priority)
            if first is not None and sequence.arrival > first:
                raise Violation("order", f"{sequence.sequence_id} was admitted before arrival {first} of its class")
            forked = sequence.choice and not sequence.num_preemptions
            if head is not None and sequence not in before and not forked:
                require(sequence.rank < head, "order", f"{sequence.rank} was admitted before {head}")

    def _counted(self) -> None:
        """Counters agree with what was told, forwarded and held."""
        metrics, runner, pool = self._engine.metrics, self._runner, self._engine.pool
        pairs = {
            "num_output_tokens": (metrics.num_output_tokens, self._told["tokens"]),
            "num_forwards": (metrics.num_forwards, runner.num_good_forwards),
            "num_rows": (metrics.num_rows, runner.num_good_rows),
            "num_accepted_tokens": (metrics.speculation.num_accepted_tokens, self._told["drafted"]),
            "pages": (pool.num_free + pool.num_cached + pool.num_referenced, pool.num_pages),
            "referenced": (pool.num_referenced, len({page for s in self.lines() for page in s.table.pages})),
            "unfinished": (len(self.live), len({s.request.request_id for s in self.lines()})),
        }
        for reason in FinishReason:
            pairs[reason.value] = (metrics.finished.get(reason, 0), self._told[reason.value])
        wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        require(not wrong, "gauges", f"(counted, found): {wrong}")

    def check_pages(self) -> None:
        """Every published page holds the tokens of its key, and the states that they have after its parents."""
        index, size = self._engine.index, self._runner.page_size
        nodes = {} if index is None else {key: (parent, page) for key, parent, page in index.entries()}
        roots = {root_key(salt) for salt in SALTS}
        histories = dict.fromkeys(roots, 0)  # by key: the hash after the page
        for key in nodes:
            chain = [key]
            while chain[-1] in nodes and chain[-1] not in histories:
                chain.append(nodes[chain[-1]][0])
            # a page may outlive a duplicate of its parent; its states cannot be recomputed then
            history = histories.get(chain[-1])
            for key in reversed(chain[:-1]):
                parent, page = nodes[key]
                slots = slice(page * size, (page + 1) * size)
                tokens, states = self._runner.tokens[slots], self._runner.states[slots]
                right = page_key(parent, tokens) == key
                if history is not None:
                    right = right and states == _states(history, tokens)
                    for token in tokens:
                        history = extend(history, token)
                    histories[key] = history
                require(right, "published pages", f"page {page} holds {list(tokens)}, not what its key says")

    def check_end(self) -> None:
        """Nothing is left of anybody."""
        pool = self._engine.pool
        require(not self.live, "events", f"{list(self.live)} were never told their end")
        require(pool.num_referenced == 0, "conservation", f"{pool.num_referenced} pages are held by an idle engine")
        for drafter in self._drafters.values():
            require(not drafter.live, "drafters", f"{drafter.name} still holds state of {drafter.live}")
        self.check_pages()


def _states(history: int, tokens: Iterable[int]) -> array[int]:
    states = array("I")
    for token in tokens:
        states.append(crc32(token.to_bytes(1, "little"), history) & STATE_BITS)
        history = extend(history, token)
    return states
