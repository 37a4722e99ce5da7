"""The figures of one side over some prompts, pooled: sums over sums, as defined in docs/architecture.md."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from specserve.acceptance.fixed import FixedLength, StepTimes, alpha, best_fixed, fixed_lengths, formula_length, gamma
from specserve.acceptance.records import Answer
from specserve.events import FinishReason, SpeculationStats
from specserve.loadgen.drive import pooled
from specserve.loadgen.report import percentile

RESAMPLES = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Nodes at one depth of the drafts, 1 below the root; `rate` = accepted ÷ drafted there."""

    position: int
    drafted: int
    accepted: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Milliseconds of a step on average: in the drafter, in the target's forward and draws, in all else."""

    step_ms: float
    draft_ms: float
    verify_ms: float
    rest_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one side did. None: it cannot be known, or there was none of it.

    Times per token are of all tokens after an answer's first. `speedup` is plain time per token ÷ this one's over the
    same prompts, `speedup_interval` its 90 % bootstrap interval over prompts; `predicted_length` is by the formula,
    `predicted_speedup` by the step times of this run. `num_asked`: steps in which the drafter was asked;
    `num_unmatched`: it had nothing to say. `num_drafted_at_stop`: draft tokens of the steps in which answers stopped.
    """

    num_prompts: int
    num_tokens: int
    acceptance_length: float
    acceptance_rate: float | None
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    positions: tuple[Position, ...]
    steps_by_tokens: tuple[int, ...]
    time: TimeSplit | None
    ms_per_token: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    alpha: float | None
    gamma: float
    predicted_length: float
    predicted_speedup: float | None
    fixed: tuple[FixedLength, ...]
    best_fixed: int | None
    num_asked: int | None
    num_unmatched: int | None
    accepted_by_drafter: Mapping[str, int]
    inactive: Mapping[str, int]
    num_drafted_at_stop: int | None
    num_stopped: int
    num_looping: int
    num_different: int


def figures_of(answers: Sequence[Answer], plain: Mapping[str, Answer], times: StepTimes) -> Figures:
    """Figures of one side's answers; `plain` are those without speculation, by prompt."""
    stats = pooled([answer.stats for answer in answers])
    paces = [Pace.of(answer, plain[answer.prompt]) for answer in answers]
    fixed = _fixed(answers, stats, times)
    knows_steps = any(answer.steps for answer in answers)
    drafts = [draft for answer in answers for draft in answer.drafts]
    seconds, decoded = sum(a.decode_seconds for a in answers), sum(a.num_decoded for a in answers)
    stopped = [answer for answer in answers if answer.reason is FinishReason.STOP]
    return Figures(
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        acceptance_length=stats.acceptance_length,
        acceptance_rate=stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else None,
        num_steps=stats.num_steps,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_committed_tokens=stats.num_committed_tokens,
        positions=positions_of(stats),
        steps_by_tokens=tuple(stats.steps_by_tokens),
        time=_time_split(answers),
        ms_per_token=1e3 * seconds / decoded if decoded else None,
        speedup=speedup_of(paces),
        speedup_interval=interval(paces, speedup_of),
        alpha=alpha(stats),
        gamma=gamma(stats),
        predicted_length=formula_length(stats),
        predicted_speedup=_predicted_speedup(answers, times),
        fixed=tuple(fixed),
        best_fixed=best_fixed(fixed),
        num_asked=sum(answer.num_asked for answer in answers) if knows_steps else None,
        num_unmatched=sum(answer.num_unmatched for answer in answers) if knows_steps else None,
        accepted_by_drafter=dict(Counter(draft.tree.drafters[node] for draft in drafts for node in draft.path)),
        inactive=dict(Counter(a.stats.inactive_reason for a in answers if a.stats.inactive_reason is not None)),
        num_drafted_at_stop=sum(a.steps[-1].num_drafted for a in stopped if a.steps) if knows_steps else None,
        num_stopped=len(stopped),
        num_looping=sum(answer.loops for answer in answers),
        num_different=sum(answer.token_ids != plain[answer.prompt].token_ids for answer in answers),
    )


def positions_of(stats: SpeculationStats) -> tuple[Position, ...]:
    both = zip(stats.drafted_per_position, stats.accepted_per_position, strict=False)
    return tuple(
        Position(position=i, drafted=drafted, accepted=accepted, rate=accepted / drafted if drafted else 0.0)
        for i, (drafted, accepted) in enumerate(both, 1)
    )


def interval(items: Sequence[T], statistic: Callable[[Sequence[T]], float | None]) -> tuple[float, float] | None:
    """5th and 95th percentile of a statistic over resampled items (seeded bootstrap); None for fewer than two."""
    if len(items) < 2:
        return None
    source = random.Random(len(items))
    values = [statistic(source.choices(items, k=len(items))) for _ in range(RESAMPLES)]
    known = [value for value in values if value is not None]
    return (percentile(known, 5), percentile(known, 95)) if known else None


class Pace(NamedTuple):
    """Seconds and tokens after the first, of one prompt, with a drafter and without."""

    seconds: float
    num_decoded: int
    plain_seconds: float
    plain_decoded: int

    @classmethod
    def of(cls, answer: Answer, plain: Answer) -> Pace:
        return cls(answer.decode_seconds, answer.num_decoded, plain.decode_seconds, plain.num_decoded)


def speedup_of(paces: Sequence[Pace]) -> float | None:
    """Plain time per token ÷ time per token; None where nothing was decoded."""
    seconds, decoded, plain_seconds, plain_decoded = (sum(column) for column in zip(*paces, strict=True))
    if not (seconds and plain_decoded and decoded):
        return None
    return float(plain_seconds / plain_decoded * decoded / seconds)


def _time_split(answers: Sequence[Answer]) -> TimeSplit | None:
    steps = [step for answer in answers for step in answer.steps]
    return time_split(
        len(steps),
        sum(s.seconds for s in steps),
        sum(s.draft_seconds for s in steps),
        sum(s.verify_seconds for s in steps),
    )


def time_split(num_steps: int, seconds: float, draft_seconds: float, verify_seconds: float) -> TimeSplit | None:
    """From totals; None where no step was seen."""
    if not num_steps:
        return None
    step, draft, verify = (1e3 * total / num_steps for total in (seconds, draft_seconds, verify_seconds))
    return TimeSplit(step_ms=step, draft_ms=draft, verify_ms=verify, rest_ms=step - draft - verify)


def _predicted_speedup(answers: Sequence[Answer], times: StepTimes) -> float | None:
    """What the committed tokens of these steps save, if each step takes what steps of its rows usually take."""
    steps = [step for answer in answers for step in answer.steps]
    usual = sum(times.seconds(step.num_rows) + step.draft_seconds for step in steps)
    return sum(step.num_committed for step in steps) * times.seconds(1) / usual if usual else None


def _fixed(answers: Sequence[Answer], stats: SpeculationStats, times: StepTimes) -> list[FixedLength]:
    drafts = [draft for answer in answers for draft in answer.drafts]
    room = sum(draft.cap for draft in drafts)
    seconds = sum(step.draft_seconds for answer in answers for step in answer.steps)
    return fixed_lengths(drafts, times, seconds / room if room else 0.0, alpha(stats) or 0.0)
