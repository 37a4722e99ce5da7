"""The same questions to a server that runs: what its counters tell, and what only an engine in one's hands does.

Without prompts of our own the server is watched: its totals are read twice, and all who use it in between are counted.
With prompts, each is asked plainly and by every side, one at a time. A server shows no trees and no single steps, so
nothing can be replayed, and what it lacks is named.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from specserve.acceptance.figures import positions_of, time_split
from specserve.acceptance.fixed import alpha, formula_length, gamma
from specserve.acceptance.questions import Settings
from specserve.acceptance.records import PLAIN, Answer, Side, prompt_name
from specserve.errors import EngineFault
from specserve.events import FinishReason, SpeculationStats
from specserve.loadgen.drive import grown
from specserve.loadgen.targets import GrpcTarget, Outcome, ServerFacts, speculation_stats
from specserve.loadgen.workload import Job

UNKNOWN_OF_COUNTERS = (
    "categories, and the speedup against off: ask prompts with --dataset",
    "which drafter guessed what, whether it was asked and had no match, and why budgets were zero",
    "the best fixed draft length: no step is shown alone",
)
UNKNOWN_OF_ANSWERS = (
    "whether the drafter was asked and had no match, and whose guesses were accepted",
    "the time split, and estimates by step times: no step is shown alone",
)


class Totals(Protocol):
    """What `GetStats` answers (specserve.v1.GetStatsResponse)."""

    speculation: Any
    step_time: Any
    draft_time: Any
    verify_time: Any
    num_forwards: int
    num_output_tokens: int


async def watch(
    address: str, seconds: float, progress: Callable[[int], None] = lambda done: None
) -> tuple[ServerFacts, dict[str, Any]]:
    """What a server's totals grew by in so many seconds, as figures.

    Raises:
        EngineFault: there is no answer.
    """
    target = GrpcTarget(address, 0.0, 0, ignore_eos=False, drafter=None)
    try:
        facts = await target.facts()
        before, began = await target.stats(), time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            progress(int(passed))
            await asyncio.sleep(min(1.0, seconds - passed))
        after, passed = await target.stats(), time.perf_counter() - began
    finally:
        await target.close()
    return facts, counted(before, after, passed)


def counted(before: Totals, after: Totals, seconds: float) -> dict[str, Any]:
    """Figures of what happened between two answers of `GetStats`."""
    stats = grown(speculation_stats(before.speculation), speculation_stats(after.speculation))
    forwards = after.num_forwards - before.num_forwards
    spent = [
        getattr(after, name).ToNanoseconds() / 1e9 - getattr(before, name).ToNanoseconds() / 1e9
        for name in ("step_time", "draft_time", "verify_time")
    ]
    split = time_split(forwards, *spent)
    return {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else None,
        "seconds": seconds,
        "tokens_per_second": (after.num_output_tokens - before.num_output_tokens) / seconds,
        "num_forwards": forwards,
        **{name: getattr(stats, name) for name in COUNTS},
        "positions": [asdict(position) for position in positions_of(stats)],
        "steps_by_tokens": stats.steps_by_tokens,
        "alpha": alpha(stats),
        "gamma": gamma(stats),
        "predicted_length": formula_length(stats) if stats.num_steps else 1.0,
        "time": None if split is None else asdict(split),
        "unknown": list(UNKNOWN_OF_COUNTERS),
    }


COUNTS = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens")


async def ask(
    address: str,
    prompts: Sequence[tuple[str, str]],
    sides: Sequence[Side],
    settings: Settings,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[ServerFacts, list[Answer], dict[str, str]]:
    """Answers of every (category, text), plainly and by each side, one request at a time; and why prompts failed.

    A prompt that fails on one side is left out on all. Prompts go as they are: only the server could cut them.

    Raises:
        EngineFault: the server cannot be reached, or no prompt was answered.
    """
    targets = _targets(address, (PLAIN, *sides), settings)
    answers: list[Answer] = []
    failed: dict[str, str] = {}
    try:
        facts = await targets[PLAIN].facts()
        for number, (category, text) in enumerate(prompts):
            try:
                answers += await _answers(targets, number, category, Job(prompt=text, max_tokens=settings.max_tokens))
            except EngineFault as error:
                failed[prompt_name(text)] = error.message
            progress((number + 1) * len(targets))
    finally:
        for target in targets.values():
            await target.close()
    if not answers:
        raise EngineFault(f"no prompt was answered: {next(iter(failed.values()))}")
    return facts, answers, failed


def _targets(address: str, sides: Sequence[Side], settings: Settings) -> dict[Side, GrpcTarget]:
    """One a side, and so a salt a side: nobody finds what another left in the caches."""
    return {
        side: GrpcTarget(
            address,
            settings.temperature,
            settings.seed,
            ignore_eos=False,
            drafter=side.drafter,
            num_draft_tokens=settings.num_draft_tokens,
        )
        for side in sides
    }


async def _answers(targets: Mapping[Side, GrpcTarget], number: int, category: str, job: Job) -> list[Answer]:
    """One prompt by every side, the first one another for each prompt."""
    sides = list(targets)
    turn = number % len(sides)
    return [await _answer(targets[side], job, category, side) for side in (*sides[turn:], *sides[:turn])]


async def _answer(target: GrpcTarget, job: Job, category: str, side: Side) -> Answer:
    assert isinstance(job.prompt, str)
    outcome = Outcome(sent_at=time.perf_counter())
    await target.ask(job, outcome)
    if outcome.finish_reason is None:
        raise EngineFault("the stream ended without a Finished")
    (first_at, first), (last_at, _) = outcome.chunks[0], outcome.chunks[-1]
    return Answer(
        prompt=prompt_name(job.prompt),
        category=category,
        side=side,
        token_ids=tuple(outcome.token_ids),
        reason=FinishReason(outcome.finish_reason),
        stats=outcome.stats or SpeculationStats(),
        decode_seconds=last_at - first_at,
        num_decoded=outcome.output_tokens - first,
    )
