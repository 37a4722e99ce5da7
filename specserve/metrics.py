"""What the engine counts. Counters only grow; gauges are computed from the state when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from specserve.events import SpeculationStats


@dataclass(slots=True)
class EngineMetrics:
    """Totals since start, cut at the same token as the answers.

    `step_seconds` is what all steps took; `draft_seconds` of it went to drafters, `verify_seconds` to the target's
    forward and its draws. `waits`: steps in which each feature of specserve/waits.py was in use.
    """

    num_forwards: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_drafter_faults: int = 0
    num_copied_slots: int = 0
    num_compacted_slots: int = 0
    max_rows_in_step: int = 0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationStats = field(default_factory=lambda: SpeculationStats(drafter="all"))

    def count_finish(self, reason: str | None) -> None:
        """None: it goes on."""
        if reason is None:
            return
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_waits(self, names: Iterable[str]) -> None:
        """Of one step, each name once."""
        for name in names:
            self.waits[name] = self.waits.get(name, 0) + 1


def count_step(stats: SpeculationStats, depths: SequenceOf[int], num_accepted: int, num_committed: int) -> None:
    """Count one step with a root row.

    Args:
        depths: depth of every node that was verified, 1 below the root; empty = nothing was drafted.
        num_accepted: nodes of the accepted path that were committed; drafts past a stop are not.
        num_committed: tokens that the step added to the answer.
    """
    stats.num_steps += 1
    stats.num_committed_tokens += num_committed
    stats.steps_by_tokens += [0] * (num_committed - len(stats.steps_by_tokens))
    if num_committed:
        stats.steps_by_tokens[num_committed - 1] += 1
    if not depths:
        return
    stats.num_drafts += 1
    stats.num_draft_tokens += len(depths)
    stats.num_accepted_tokens += num_accepted
    grow = max(depths) - len(stats.drafted_per_position)
    if grow > 0:
        stats.drafted_per_position += [0] * grow
        stats.accepted_per_position += [0] * grow
    drafted = stats.drafted_per_position
    for depth in depths:
        drafted[depth - 1] += 1
    for position in range(num_accepted):
        stats.accepted_per_position[position] += 1
