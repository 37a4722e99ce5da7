"""The simulator: the real engine around a hash language model, seeded scripts of arrivals and faults, every law
recounted after every step.

A run is a row of episodes (script.py), each in a small world of its own and each a function of the seed and its
number alone. A violation comes with the shortest script that still shows it, which `replay` plays again.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.sim.episode import Episode
from specserve.sim.hashmodel import Violation
from specserve.sim.script import Action, World, draw_script, draw_world, from_json, to_json

MAX_SHRINK_PLAYS = 400


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did. `violation` has the law, what broke it, seed, episode, step and the reproducer; or is None."""

    seed: int
    num_episodes: int = 0
    num_steps: int = 0
    num_rows: int = 0
    seconds: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    violation: dict[str, Any] | None = None

    @property
    def steps_per_minute(self) -> float:
        return 60.0 * self.num_steps / self.seconds if self.seconds else 0.0

    @property
    def rows_per_step(self) -> float:
        return self.num_rows / self.num_steps if self.num_steps else 0.0


def simulate(seed: int, num_steps: int, progress: Callable[[int], None] = lambda done: None) -> Report:
    """Play episodes until `num_steps` steps with rows were made, or a law is broken.

    Args:
        progress: told the number of steps so far, after every episode.
    """
    report = Report(seed=seed)
    began = time.perf_counter()
    while report.num_steps < num_steps and report.violation is None:
        name = f"{seed}/{report.num_episodes}"
        rng = random.Random(name)
        world = draw_world(name, rng)
        actions = draw_script(world, rng)
        episode = Episode(world, actions)
        try:
            episode.play()
        except Violation as violation:
            report.violation = _told(violation, report, world, shrink(world, actions, violation))
        report.num_episodes += 1
        report.num_steps += episode.runner.num_forwards
        report.num_rows += episode.runner.num_rows
        report.coverage += episode.coverage
        report.seconds = time.perf_counter() - began
        progress(report.num_steps)
    return report


def _told(violation: Violation, report: Report, world: World, actions: Sequence[Action]) -> dict[str, Any]:
    return {
        "law": violation.law,
        "what": violation.what,
        "seed": report.seed,
        "episode": report.num_episodes,
        "step": violation.step,
        "reproducer": to_json(world, actions),
    }


def play(world: World, actions: Sequence[Action]) -> Violation | None:
    """The law that a script breaks, if it breaks one."""
    try:
        Episode(world, actions).play()
    except Violation as violation:
        return violation
    return None


def replay(reproducer: dict[str, Any]) -> Violation | None:
    """Play the `reproducer` of a violation again.

    Raises:
        KeyError, TypeError: it is not one.
    """
    return play(*from_json(reproducer))


def shrink(world: World, actions: Sequence[Action], violation: Violation) -> tuple[Action, ...]:
    """The script without whatever can go while the same law is still broken: halves first, then ever smaller parts."""
    left = [action for action in actions if action.at <= violation.step]
    plays = 0
    size = max(len(left) // 2, 1)
    while True:
        start, num_before = 0, len(left)
        while start < len(left) and plays < MAX_SHRINK_PLAYS:
            shorter = left[:start] + left[start + size :]
            plays += 1
            found = play(world, shorter)
            if found is not None and found.law == violation.law:
                left = [action for action in shorter if action.at <= found.step]
            else:
                start += size
        if plays >= MAX_SHRINK_PLAYS or (size == 1 and len(left) == num_before):
            return tuple(left)
        size = max(size // 2, 1)
