"""What other draft lengths would have brought: estimates from the trees and step times of a run.

Two predictions stand beside what was measured. The textbook formula takes every guess to come true with one chance α,
whatever its position. The replay cuts every recorded tree down to K nodes and counts how far the accepted path still
goes, and charges each step what steps of so many rows took in this run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specserve.acceptance.records import Draft, Step
from specserve.events import SpeculationStats

MAX_FIXED = 16
Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength:
    """Estimate for `num_draft_tokens` nodes in every step; `beyond`: more than was ever asked for in the run."""

    num_draft_tokens: int
    tokens_per_step: float
    step_ms: float
    tokens_per_second: float
    beyond: bool


class StepTimes:
    """Seconds of a step without its drafter, by rows.

    With the engine's cost model they are its `curve` (rows → seconds), times what steps of this run took against it.
    Without, they are medians of the run, in between and beyond along straight lines; more rows never take less, and
    where medians say so, which is noise, such neighbours share their weighted mean.
    """

    def __init__(self, steps: Iterable[Step], curve: Curve | None = None) -> None:
        by_rows: dict[int, list[float]] = {}
        for step in steps:
            by_rows.setdefault(step.num_rows, []).append(step.seconds - step.draft_seconds)
        self.curve = curve
        if curve is not None:
            ratios = [seconds / curve(rows) for rows, every in by_rows.items() for seconds in every]
            self._scale = statistics.median(ratios) if ratios else 1.0
        self._rows = sorted(by_rows)
        blocks: list[tuple[float, int, int]] = []  # (seconds, steps, row counts) with seconds rising
        for rows in self._rows:
            block = (statistics.median(by_rows[rows]), len(by_rows[rows]), 1)
            while blocks and blocks[-1][0] > block[0]:
                block = _joined(blocks.pop(), block)
            blocks.append(block)
        self._seconds = [seconds for seconds, _, width in blocks for _ in range(width)]

    def __bool__(self) -> bool:
        return bool(self._rows)

    def seconds(self, rows: float) -> float:
        """Of a step with so many rows; 0 if nothing was measured."""
        if self.curve is not None:
            return self._scale * self.curve(rows)
        if len(self._rows) < 2:
            return self._seconds[0] if self._rows else 0.0
        at = next((i for i, known in enumerate(self._rows) if known >= rows), len(self._rows) - 1)
        low, high = (at - 1, at) if at else (0, 1)
        slope = (self._seconds[high] - self._seconds[low]) / (self._rows[high] - self._rows[low])
        return self._seconds[low] + slope * (rows - self._rows[low])


def _joined(left: tuple[float, int, int], right: tuple[float, int, int]) -> tuple[float, int, int]:
    count = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / count, count, left[2] + right[2]


def alpha(stats: SpeculationStats) -> float | None:
    """The chance that a guess comes true, as one number: accepted ÷ tried, a position being tried when all before it
    came true and something was drafted there. None = nothing was drafted."""
    accepted = stats.accepted_per_position
    before = [stats.num_drafts, *accepted]
    tried = sum(map(min, before, stats.drafted_per_position))
    return sum(accepted) / tried if tried else None


def gamma(stats: SpeculationStats) -> float:
    """Mean depth of a draft; 0 where nothing was drafted."""
    depths = sum(min(drafted, stats.num_drafts) for drafted in stats.drafted_per_position)
    return depths / stats.num_drafts if stats.num_drafts else 0.0


def formula_length(stats: SpeculationStats) -> float:
    """Acceptance length by (1 − α^(γ+1)) / (1 − α) in steps with a draft, and 1 in the others.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), equation 1.
    """
    chance = alpha(stats)
    if chance is None:
        return 1.0
    depth = gamma(stats)
    with_draft = depth + 1 if chance == 1.0 else (1 - chance ** (depth + 1)) / (1 - chance)
    share = stats.num_drafts / stats.num_steps
    return share * with_draft + 1 - share


def fixed_lengths(drafts: Sequence[Draft], times: StepTimes, draft_seconds: float, chance: float) -> list[FixedLength]:
    """Estimates for 0 to MAX_FIXED nodes a step, over the steps in which the drafter was asked.

    Args:
        draft_seconds: what the drafter takes per node that it may draft.
        chance: that a chain which was accepted to its cap would have gone on, per further node.
    """
    if not drafts or not times:
        return []
    most = max(draft.cap for draft in drafts)
    found = []
    for count in range(MAX_FIXED + 1):
        outcomes = [_replay(draft, count, chance) for draft in drafts]
        tokens = 1 + statistics.fmean(accepted for accepted, _ in outcomes)
        seconds = statistics.fmean(times.seconds(1 + nodes) for _, nodes in outcomes) + count * draft_seconds
        found.append(
            FixedLength(
                num_draft_tokens=count,
                tokens_per_step=tokens,
                step_ms=1e3 * seconds,
                tokens_per_second=tokens / seconds if seconds else 0.0,
                beyond=count > most,
            )
        )
    return found


def best_fixed(found: Sequence[FixedLength]) -> int | None:
    """The draft length of most tokens a second, the shortest of equals; None without estimates."""
    return max(found, key=lambda fixed: fixed.tokens_per_second).num_draft_tokens if found else None


def _replay(draft: Draft, count: int, chance: float) -> tuple[float, int]:
    """(nodes accepted, nodes drafted) with room for `count` nodes."""
    tree, path, size = draft.tree, draft.path, len(draft.tree)
    if count < size:
        kept = set(tree.prune(count, size).paths()) if path and count else set()
        ids = tuple(tree.token_ids[node] for node in path)
        return sum(ids[:depth] in kept for depth in range(1, len(ids) + 1)), count
    if size == draft.cap == len(path):  # a chain that was cut by its cap: it might have gone on
        more = count - size
        return size + sum(chance**i for i in range(1, more + 1)), count
    return len(path), size
