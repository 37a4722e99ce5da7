"""The simulator: a fixed seed breaks no law, and each planted bug breaks the law that is meant to catch it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specserve import engine, prefix, sim
from specserve.cli import app
from specserve.engine import Engine
from specserve.pages import Move, PageTable
from specserve.scheduler import Scheduler
from specserve.sim.episode import Episode
from specserve.sim.script import Arrival, Fault, draw_world

Patch = Callable[[pytest.MonkeyPatch], None]


def test_a_fixed_seed_breaks_no_law() -> None:
    report = sim.simulate(seed=1, num_steps=4000)
    assert report.violation is None, report.violation
    assert report.num_steps >= 4000
    assert report.rows_per_step >= 4
    happened = {what for what, count in report.coverage.items() if count}
    assert happened >= {
        "cancelled: queued",
        "cancelled: decoding",
        "cancelled: ended",
        "failed: Cancelled",
        "failed: DeadlineExceeded",
        "failed: EngineFault",
        "failed: NumericFault",
        "refused: duplicate",
        "refused: overloaded",
        "refused: too long",
        "preemptions",
        "drafter faults",
        "compacted slots",
        "copied slots",
        "cached tokens",
        "accepted tokens",
    }


def test_equal_seeds_play_equal_episodes() -> None:
    first, second = (sim.simulate(seed=5, num_steps=200) for _ in range(2))
    assert (first.num_rows, first.coverage) == (second.num_rows, second.coverage)


def forget_a_move(patch: pytest.MonkeyPatch) -> None:
    commit = PageTable.commit

    def forgetful(self: PageTable, num_pending: int, path: Sequence[int] = ()) -> list[Move]:
        return commit(self, num_pending, path)[1:]

    patch.setattr(PageTable, "commit", forgetful)


def admit_the_second(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def pushy(self: Scheduler) -> Any:
        if len(self.waiting) > 1:
            self.waiting[:2] = reversed(self.waiting[:2])
        return plan(self)

    patch.setattr(Scheduler, "plan", pushy)


def publish_before_compaction(patch: pytest.MonkeyPatch) -> None:
    """A full page is entered under its key, and the moves that bring its tokens together never come."""
    commit_rows = Engine._commit_rows

    def hasty(self: Engine, sequence: Any, num_pending: int, path: Sequence[int]) -> None:
        apply = self._runner.apply
        self._runner.apply = lambda moves: None  # type: ignore[method-assign]
        commit_rows(self, sequence, num_pending, path)
        self._runner.apply = apply  # type: ignore[method-assign]

    patch.setattr(Engine, "_commit_rows", hasty)


def take_a_wrong_child(patch: pytest.MonkeyPatch) -> None:
    def trusting(tree: Any, drawn: Sequence[int]) -> tuple[tuple[int, ...], int]:
        return ((0,), drawn[1]) if len(tree) else ((), drawn[0])

    patch.setattr(engine, "walk", trusting)


def leak_a_page(patch: pytest.MonkeyPatch) -> None:
    def leaky(self: PageTable) -> None:
        self.pages.clear()
        self.keys.clear()
        self.cached_len = self.reserved_len = self.promised_len = 0

    patch.setattr(PageTable, "release", leaky)


def ignore_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """A page is entered under a key of its own tokens alone, so it is hit after any other prefix."""
    page_key = prefix.page_key
    patch.setattr(prefix, "page_key", lambda parent, token_ids: page_key(b"", token_ids))


def keep_drafter_state(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Engine, sequence: Any) -> None:
        self.scheduler.remove(sequence)

    patch.setattr(Engine, "_drop", forget)


def starve_the_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_try_admit", lambda self, sequence: False)


def miscount(patch: pytest.MonkeyPatch) -> None:
    def careless(stats: Any, depths: list[int], num_accepted: int, num_committed: int) -> None:
        stats.num_steps += 1
        stats.num_committed_tokens += num_committed

    patch.setattr(engine, "count_step", careless)


PLANTED: dict[Patch, set[str]] = {
    forget_a_move: {"output", "published pages"},
    admit_the_second: {"order"},
    publish_before_compaction: {"output", "published pages"},
    take_a_wrong_child: {"output"},
    leak_a_page: {"conservation"},
    ignore_the_prefix: {"output", "published pages", "conservation"},
    keep_drafter_state: {"drafters"},
    starve_the_line: {"liveness"},
    miscount: {"numbers", "gauges"},
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught_and_reproduced(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "MAX_SHRINK_PLAYS", 80)
    with monkeypatch.context() as patch:
        plant(patch)
        report = sim.simulate(seed=2, num_steps=3000)
        found = report.violation
        assert found is not None
        assert found["law"] in PLANTED[plant], found
        script = json.loads(json.dumps(found["reproducer"]))
        again = sim.replay(script)
        assert again is not None
        assert again.law == found["law"]
    assert len(script["arrivals"]) <= 8
    assert sim.replay(script) is None, "the reproducer breaks a law without the bug"


def test_the_command_prints_a_reproducer_that_it_can_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        take_a_wrong_child(patch)
        result = CliRunner().invoke(app, ["sim", "--seed", "2", "--steps", "1e3"])
        assert result.exit_code == 1, result.output
        assert "seed 2, episode 0, step " in result.stdout
        script = tmp_path / "script.json"
        script.write_text(result.stdout.splitlines()[-1])
        played = CliRunner().invoke(app, ["sim", "--replay", str(script)])
        assert played.exit_code == 1
        assert "output" in played.stdout
    healthy = CliRunner().invoke(app, ["sim", "--replay", str(script), "--json"])
    assert (healthy.exit_code, json.loads(healthy.stdout)) == (0, {"violation": None})


def test_a_file_that_is_no_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"world": {}}')
    result = CliRunner().invoke(app, ["sim", "--replay", str(tmp_path / "x.json")])
    assert "cannot be played" in str(result.exception)


def test_json_has_the_figures() -> None:
    result = CliRunner().invoke(app, ["sim", "--steps", "50", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["violation"] is None
    assert told["num_steps"] >= 50
    assert told["steps_per_minute"] > 0


def test_a_strike_on_a_draft_node_costs_only_the_draft() -> None:
    """Rows that are not finite end a request if they are its own tokens, and shorten the draft if they are guesses."""
    world = draw_world("strike", random.Random(0))
    arrival = Arrival(
        at=0, number=0, prompt=(1, 2, 3), max_tokens=12, min_tokens=12, n=1, temperature=0.0, seed=0, stop_id=None,
        stop_text=None, priority=0, drafter="tree", nodes=5, patience=None, salt="",
    )  # fmt: skip
    for row, failed in ((1, 0), (0, 1)):
        episode = Episode(world, (arrival, Fault(at=2, kind="not finite", number=0, row=row)))
        episode.play()
        assert episode.coverage["failed: NumericFault"] == failed
