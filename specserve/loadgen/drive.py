"""Asks every job of a workload at its time, so many at once at most, and for so long at most.

Closed loop: all jobs are due at once and the gate lets `max_concurrency` of them through. Open loop: arrivals are the
workload's, whatever the server does. A request is timed from when it is sent, after the gate, as `vllm bench serve`
does.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specserve.errors import EngineFault
from specserve.events import SpeculationStats
from specserve.loadgen.targets import Counters, Outcome, Target
from specserve.loadgen.workload import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All outcomes, in the order of sending; `begin` is on their clock. `num_unsent` jobs had no time left."""

    outcomes: tuple[Outcome, ...]
    begin: float
    duration: float
    num_unsent: int
    num_preemptions: int | None
    speculation: SpeculationStats | None


async def drive(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None = None,
    max_duration: float = 600.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Ask all jobs; those that have no answer after `max_duration` seconds are cancelled, and count as failed."""
    before = await target.counters()
    gate = asyncio.Semaphore(max_concurrency or len(jobs))
    outcomes: list[Outcome] = []
    num_done = itertools.count(1)
    begin = time.perf_counter()

    async def ask_when_due(job: Job) -> None:
        await asyncio.sleep(begin + job.arrival - time.perf_counter())
        async with gate:
            outcome = Outcome(sent_at=time.perf_counter())
            outcomes.append(outcome)
            await _ask(target, job, outcome)
        progress(next(num_done))

    tasks = [asyncio.create_task(ask_when_due(job)) for job in jobs]
    await asyncio.wait(tasks, timeout=max_duration)
    duration = time.perf_counter() - begin
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    after = await target.counters()
    return Run(
        outcomes=tuple(outcomes),
        begin=begin,
        duration=duration,
        num_unsent=len(jobs) - len(outcomes),
        num_preemptions=_grown(before, after),
        speculation=_speculation(outcomes, before, after),
    )


async def _ask(target: Target, job: Job, outcome: Outcome) -> None:
    """One request to its end; what goes wrong is noted in its outcome."""
    try:
        await target.ask(job, outcome)
        if not outcome.chunks:
            outcome.error = "the answer held no token"
    except EngineFault as error:
        outcome.error = error.message
    except asyncio.CancelledError:
        outcome.error = "the run's time was over"
        raise
    finally:
        outcome.ended_at = time.perf_counter()


def _grown(before: Counters, after: Counters) -> int | None:
    if before.num_preemptions is None or after.num_preemptions is None:
        return None
    return after.num_preemptions - before.num_preemptions


def _speculation(outcomes: Sequence[Outcome], before: Counters, after: Counters) -> SpeculationStats | None:
    """What the answers told of drafting, pooled; where they told nothing, what the server's totals grew by."""
    told = [outcome.stats for outcome in outcomes if outcome.stats is not None]
    if told:
        return pooled(told)
    if after.speculation is None:
        return None
    return grown(before.speculation or SpeculationStats(), after.speculation)


def grown(before: SpeculationStats, after: SpeculationStats) -> SpeculationStats:
    """What totals that only grow became more by."""

    def by_place(earlier: list[int], later: list[int]) -> list[int]:
        return [count - (earlier[i] if i < len(earlier) else 0) for i, count in enumerate(later)]

    return replace(
        after,
        num_steps=after.num_steps - before.num_steps,
        num_committed_tokens=after.num_committed_tokens - before.num_committed_tokens,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_per_position=by_place(before.accepted_per_position, after.accepted_per_position),
        drafted_per_position=by_place(before.drafted_per_position, after.drafted_per_position),
        steps_by_tokens=by_place(before.steps_by_tokens, after.steps_by_tokens),
    )


def pooled(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Sums over choices; the drafter is named where all had the same."""
    names = {part.drafter for part in parts}
    total = SpeculationStats(drafter=names.pop() if len(names) == 1 else "several")
    for part in parts:
        total.num_steps += part.num_steps
        total.num_committed_tokens += part.num_committed_tokens
        total.num_drafts += part.num_drafts
        total.num_draft_tokens += part.num_draft_tokens
        total.num_accepted_tokens += part.num_accepted_tokens
        total.accepted_per_position = _summed(total.accepted_per_position, part.accepted_per_position)
        total.drafted_per_position = _summed(total.drafted_per_position, part.drafted_per_position)
        total.steps_by_tokens = _summed(total.steps_by_tokens, part.steps_by_tokens)
    return total


def _summed(left: list[int], right: list[int]) -> list[int]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return [count + (shorter[i] if i < len(shorter) else 0) for i, count in enumerate(longer)]
