"""The controller's regret on the simulator's clock, and the simulator itself: no policy may be favoured by it."""

from __future__ import annotations

import pytest

from specserve.sim.regret import (
    FIXED_LENGTHS,
    MACHINE,
    TRACES,
    Game,
    Guesses,
    Phase,
    World,
    best_tree,
    regret_of,
)

MAX_REGRET = 0.03
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
PLAYED = (
    "stationary, lookup, 1 running",
    "stationary, tree, 4 running",
    "stationary, overconfident tree, 16 running",
    "stationary, lookup, 32 running",
    "step change of acceptance, lookup, 8 running",
    "step change of acceptance, tree, 16 running",
    "step change of load, lookup",
    "bursty load, tree",
)


@pytest.mark.parametrize("name", PLAYED)
def test_regret_against_the_best_fixed_length_is_small(name: str) -> None:
    told = regret_of(name, World(), LENGTHS)
    assert told.regret <= MAX_REGRET, told
    assert told.against_off <= 0.01, told


@pytest.mark.parametrize("num_running", [1, 4, 8, 32])
def test_where_nothing_is_accepted_next_to_nothing_is_lost(num_running: int) -> None:
    told = regret_of(f"nothing accepted, {num_running} running", World(), (0,))
    assert told.against_off <= 0.01, told


@pytest.mark.parametrize("factors", [(1.0, 0.85, 0.85, 0.85), (1.0, 1.15, 1.15, 1.15), (1.0, 0.9, 1.1, 0.8)])
@pytest.mark.parametrize("name", ["stationary, lookup, 16 running", "stationary, lookup, 32 running"])
def test_a_sweep_that_was_somewhat_wrong_costs_little(name: str, factors: tuple[float, ...]) -> None:
    """A machine that was busy during its two seconds of sweep, and is three times as slow now."""
    world = World(believed=MACHINE.corrected(factors), slowness=3.0, noise=0.1)
    told = regret_of(name, world, LENGTHS)
    assert told.regret <= MAX_REGRET, told


def test_probes_are_rare_once_it_is_known_that_nothing_is_accepted() -> None:
    wrong = Guesses((0.0001,))
    game = Game(World(), None)
    game.play((Phase(16, 8_000, wrong),))
    steps, asking = game.num_steps, game.num_asking_steps
    game.play((Phase(16, 40_000, wrong),))
    assert game.num_asking_steps - asking <= 0.01 * (game.num_steps - steps)
    assert game.num_asking_steps > asking


# ---- the simulator


def test_equal_games_take_equal_seconds() -> None:
    trace = (Phase(3, 600, Guesses((0.7, 0.0), siblings=0.4, estimates=1.0)),)
    assert Game(World(), None).play(trace) == Game(World(), None).play(trace)


def test_what_is_right_does_not_depend_on_the_policy() -> None:
    """Alone and without noise, K nodes of a chain of sure guesses are worth exactly K tokens more a step."""
    sure = (Phase(1, 1270, Guesses((0.99,))),)
    steps = {length: _steps(length, sure) for length in (0, 1, 3)}
    assert steps[0] == pytest.approx(1270, abs=1)
    assert steps[1] == pytest.approx(1270 / 1.99, rel=0.02)
    assert steps[3] == pytest.approx(1270 / (1 + 0.99 + 0.99**2 + 0.99**3), rel=0.02)


def _steps(length: int, trace: tuple[Phase, ...]) -> int:
    game = Game(World(noise=0.0), length)
    game.play(trace)
    return game.num_steps


@pytest.mark.parametrize("siblings", [0.0, 0.4])
def test_trees_survive_as_often_as_they_say(siblings: float) -> None:
    """Only 4 of 128 places of an answer have less room than 4 nodes need."""
    game = Game(World(), 4)
    game.play((Phase(8, 20_000, Guesses((0.6,), siblings=siblings)),))
    _, survivals = best_tree(0.6, siblings, 4)
    assert game.num_accepted / game.num_drafting_steps / 8 == pytest.approx(sum(survivals), rel=0.05)


def test_every_trace_offers_never_drafting_for_comparison() -> None:
    assert 0 in FIXED_LENGTHS and set(PLAYED) <= set(TRACES)
