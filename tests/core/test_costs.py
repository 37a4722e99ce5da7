"""Step costs: the curve's arithmetic, what noise may and may not do to it, and a drafter's own seconds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.costs import SPREAD, Drafted, DraftSeconds, FollowedCosts, StepCosts, StepLoad, monotone

COSTS = StepCosts(
    curve=tuple(0.010 + 0.001 * (n // 17) + 0.0001 * n for n in range(65)),
    row=0.0004,
    sequence=0.0001,
    accepted=0.00002,
    context=1e-6,
    node_context=2e-7,
    sampled=5e-5,
)


def test_seconds_add_up() -> None:
    load = StepLoad(3, num_nodes=7, num_prompt_rows=2, num_accepted=4, context=100, node_context=50, num_sampled=10)
    told = COSTS.seconds(load)
    parts = COSTS.curve[12] + 2 * 0.0001 + 4 * 0.00002 + 100 * 1e-6 + 50 * 2e-7 + 10 * 5e-5
    assert told == pytest.approx(parts)
    assert COSTS.rows(80) == pytest.approx(COSTS.curve[64] + 16 * 0.0004)
    assert COSTS.rows(10.25) == pytest.approx(0.75 * COSTS.curve[10] + 0.25 * COSTS.curve[11])


@pytest.mark.parametrize(("num_rows", "count"), [(1, 0), (1, 15), (60, 9), (64, 3), (70, 5)])
def test_further_rows_are_differences_of_rows(num_rows: int, count: int) -> None:
    told = COSTS.further_rows(num_rows, count)
    assert told == pytest.approx([COSTS.rows(num_rows + n) - COSTS.rows(num_rows) for n in range(count + 1)])


def test_costs_survive_a_file() -> None:
    assert StepCosts.from_json(COSTS.to_json()) == COSTS


@pytest.mark.parametrize("curve", [(), (1.0,), (1.0, 2.0, 1.5), (0.0, 1.0)])
def test_a_curve_that_falls_or_is_none_is_refused(curve: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        StepCosts(curve=curve, row=0.0)


def test_a_negative_slope_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        StepCosts(curve=(1.0, 1.0), row=-0.1)


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=8))
def test_a_measured_curve_is_monotone_and_below_its_points(seconds: list[float]) -> None:
    points = [(1 + 4 * i, value) for i, value in enumerate(seconds)]
    curve = monotone(points)
    assert list(curve) == sorted(curve)
    assert len(curve) == points[-1][0] + 1
    assert all(curve[rows] <= value for rows, value in points)


def test_a_point_that_noise_raised_does_not_raise_later_ones() -> None:
    assert monotone([(1, 1.0), (2, 5.0), (4, 2.0)]) == (1.0, 1.0, 2.0, 2.0, 2.0)


def test_the_scale_follows_a_slower_machine_and_ignores_single_stalls() -> None:
    followed, load = FollowedCosts(COSTS), StepLoad(2, num_nodes=3)
    for step in range(200):
        stall = 10.0 if step % 7 == 0 else 1.0
        followed.follow(load, 1.5 * stall * COSTS.seconds(load))
    assert followed.scale == pytest.approx(1.5)
    assert followed.now.curve == pytest.approx(COSTS.curve), "one size of step tells nothing about the shape"


def test_a_clock_that_stands_still_tells_nothing() -> None:
    followed = FollowedCosts(COSTS)
    followed.follow(StepLoad(1), 0.0)
    assert followed.scale == 1.0


def test_sizes_that_alternate_correct_the_shape() -> None:
    """The machine's second tile is dearer than the sweep said; steps of both sizes are seen, under noise."""
    rng, followed = random.Random(0), FollowedCosts(COSTS)
    true = COSTS.corrected([1.0, 1.2, 1.2, 1.2])
    for step in range(2000):
        load = StepLoad(12, num_nodes=10 if step % 3 else 0)
        followed.follow(load, true.seconds(load) * rng.uniform(0.9, 1.1) * (2.0 if step > 1000 else 1.0))
    told, believed = (costs.rows(22) / costs.rows(12) for costs in (followed.now, COSTS))
    assert told == pytest.approx(true.rows(22) / true.rows(12), rel=0.04)
    assert believed < 0.9 * told
    assert followed.now.seconds(load) * followed.scale == pytest.approx(2.0 * true.seconds(load), rel=0.04)


def test_stalls_do_not_make_the_shape_creep() -> None:
    """Every tenth step takes up to twice as long, whatever its size: nothing is to be learned from that."""
    rng, followed = random.Random(0), FollowedCosts(COSTS)
    for step in range(5000):
        load = StepLoad(12, num_nodes=10 if step % 3 else 0)
        stall = rng.uniform(1.0, 2.0) if rng.random() < 0.1 else 1.0
        followed.follow(load, COSTS.seconds(load) * rng.uniform(0.95, 1.05) * stall)
    assert followed.factors == pytest.approx([1.0] * len(followed.factors), abs=0.05)
    assert followed.scale == pytest.approx(1.0, rel=0.05)


def test_rows_beyond_the_curve_are_corrected_like_its_last_tile() -> None:
    true = COSTS.corrected([1.0, 1.0, 1.0, 1.5])
    assert true.rows(80) - true.rows(64) == pytest.approx(1.5 * (COSTS.rows(80) - COSTS.rows(64)))


def drafted(num_trees: int, seconds: float, num_nodes: int = 0, num_new: int = 0) -> Drafted:
    return Drafted(num_trees, num_nodes, num_new, seconds)


def usual(seconds: DraftSeconds, num_trees: int, num_nodes: int = 0) -> float:
    """Of so many trees with so many nodes in all."""
    return num_trees * seconds.tree(num_trees) + num_nodes * seconds.node(num_trees)


def test_unknown_draft_seconds_are_bounded_from_below_by_what_is_known() -> None:
    seconds = DraftSeconds()
    assert usual(seconds, 4, 9) == 0.0, "a drafter is tried before it is dismissed"
    seconds.follow(drafted(8, 0.004))
    assert usual(seconds, 8) == pytest.approx(0.004)
    assert usual(seconds, 64) == pytest.approx(0.004), "no less than for fewer"
    assert usual(seconds, 2) == pytest.approx(0.001), "no less than their share"


def test_nodes_take_their_share_of_a_tree() -> None:
    seconds = DraftSeconds()
    seconds.follow(drafted(2, 2 * (0.00014 + 12 * 0.00002), num_nodes=24))
    assert seconds.tree(2) == pytest.approx(0.00014)
    assert seconds.node(2) == pytest.approx(0.00002)


def test_one_long_call_counts_little_and_a_stale_figure_does_not_stand() -> None:
    seconds = DraftSeconds()
    for _ in range(20):
        seconds.follow(drafted(1, 0.001))
    seconds.follow(drafted(1, 1.0))
    assert usual(seconds, 1) <= 0.0011 + 1e-9
    seconds.follow(drafted(32, 0.5))  # measured once, while the machine stalled
    assert usual(seconds, 32) <= 2 * 32 * 0.0011 + 1e-9
    seconds.follow(drafted(1, 0.001))
    assert usual(seconds, 32) <= 1.2 * 32 * 0.001


def test_what_new_sequences_take_is_spread_over_their_calls() -> None:
    seconds = DraftSeconds()
    seconds.follow(drafted(4, 0.001))
    seconds.follow(drafted(4, 0.001 + 2 * SPREAD * 0.0001, num_new=2))
    assert usual(seconds, 4) == pytest.approx(0.001 + 4 * 0.0001)
