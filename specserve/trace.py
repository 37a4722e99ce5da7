"""What the last steps were: what the controller was told, what it chose, and what came of it.

A ring of small records, always on, so that a strange step can be looked at after it happened. Records only; the engine
fills it, and whoever wants it reads it or dumps it as JSON lines.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

KEPT_STEPS = 4096


class StepTrace(NamedTuple):
    """One step. `caps` are those of sequences with a root row, in rank order; seconds are on the engine's clock.

    `num_proposed` counts nodes before the controller's trimming, `num_nodes` those that were verified.
    `predicted_seconds` and `seconds` are without drafting; 0 predicted = costs were not measured. `scale`: how many
    times as long as at start-up steps take.
    """

    num_sequences: int
    num_prompt_rows: int
    context: int
    caps: tuple[int, ...]
    num_proposed: int
    num_nodes: int
    num_accepted: int
    predicted_seconds: float
    seconds: float
    draft_seconds: float
    scale: float


class Trace:
    """The last steps, oldest first; `num_steps` were added since start."""

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self.num_steps = 0
        self.steps: deque[StepTrace] = deque(maxlen=kept)

    def add(self, step: StepTrace) -> None:
        self.num_steps += 1
        self.steps.append(step)

    def json_lines(self) -> Iterator[str]:
        """One JSON object a step; `step` counts from 0 at start."""
        first = self.num_steps - len(self.steps)
        for number, step in enumerate(self.steps, first):
            yield json.dumps({"step": number, **step._asdict()})
