"""Survival estimates of the n-gram drafter, and the record that every estimate comes from."""

from __future__ import annotations

import random

import pytest
from driving import drive, row
from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts.ngram import NgramDrafter
from specserve_drafts.record import Record, committed

from specserve.proposal import DraftTree


def first_draft(tokens: list[int], cap: int = 6) -> DraftTree:
    drafter = NgramDrafter()
    drafter.start(row(tokens, 1))
    (tree,) = drafter.propose([row(tokens, 1)], [cap])
    return tree


def test_every_node_has_an_estimate_and_longer_matches_a_better_one() -> None:
    short, long = first_draft([1, 2, 3, 4, 5, 6, 7, 1]), first_draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4])
    assert short.token_ids == (2, 3, 4, 5, 6, 7) and long.token_ids == (5, 6, 7, 1, 2, 3)
    for tree in (short, long):
        assert tree.fault(10) is None
        assert tree.survival[-1] > 0 and list(tree.survival) == sorted(tree.survival, reverse=True)
    assert all(a < b for a, b in zip(short.survival, long.survival, strict=True))
    assert first_draft([1, 2, 3]) == DraftTree()


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_survival_is_what_survives(share: float) -> None:
    rng, drafter, nodes = random.Random(3), NgramDrafter(), []
    for name in range(60):
        text = [100 + i % 12 if rng.random() < share else rng.randrange(12) for i in range(200)]
        steps = drive(drafter, [1, 2], text, cap=8, name=str(name))
        if name >= 20:
            nodes += [(value, i in step.path) for step in steps for i, value in enumerate(step.tree.survival)]
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = [(value, hit) for value, hit in nodes if low <= value < low + 0.25]
        if len(inside) >= 300:
            mean = sum(value for value, _ in inside) / len(inside)
            assert abs(mean - sum(hit for _, hit in inside) / len(inside)) < 0.1, f"from {low} on"


def test_a_sequence_leaves_nothing_behind() -> None:
    drafter = NgramDrafter()
    drive(drafter, [1, 2, 3], [1, 2, 3] * 5)
    drafter.stop(row([1, 2], 1, name="never seen"))
    assert drafter._tables == {} and drafter._drafts == {}


def test_a_tree_is_judged_by_what_was_committed_whatever_was_verified() -> None:
    # root → 5 → 6 → 7, 5 → 8, and 9 beside 5 with 6 below it
    tree = DraftTree((5, 9, 6, 8, 7, 6), (-1, -1, 0, 0, 2, 1), ("d",) * 6)
    assert list(committed(tree, (5, 6, 2))) == [(0, True), (1, False), (2, True), (3, False), (4, False)]
    assert list(committed(tree, (5, 6))) == [(0, True), (1, False), (2, True), (3, False)]
    assert list(committed(tree, (4,))) == [(0, False), (1, False)]
    assert list(committed(tree, ())) == []


@given(
    parents=st.lists(st.integers(-1, 10), max_size=12),
    token_ids=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    tokens=st.lists(st.integers(0, 3), max_size=5),
)
def test_judged_are_exactly_the_nodes_below_committed_ones(
    parents: list[int], token_ids: list[int], tokens: list[int]
) -> None:
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    tree = DraftTree(tuple(token_ids[: len(parents)]), tuple(parents), ("d",) * len(parents))
    judged = {i: path[-1] == tokens[len(path) - 1] for i, path in enumerate(tree.paths())
              if len(path) <= len(tokens) and list(path[:-1]) == tokens[: len(path) - 1]}  # fmt: skip
    assert dict(committed(tree, tokens)) == judged


def test_a_record_starts_from_its_prior_and_follows_a_change() -> None:
    record = Record(weight=8, memory=64)
    assert record.estimate("kind", 0.3) == pytest.approx(0.3)
    for _ in range(1000):
        record.count("kind", True)
    assert record.estimate("kind", 0.3) > 0.85 and record.estimate("other", 0.3) == pytest.approx(0.3)
    for _ in range(200):
        record.count("kind", False)
    assert record.estimate("kind", 0.3) < 0.15
