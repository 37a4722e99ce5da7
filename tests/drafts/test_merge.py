"""Merging: every path once, at the highest chance that anybody claims, and of all paths the likeliest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import inf, isclose

from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts.merge import LEAST_SURVIVAL, Sprout, merge

from specserve.proposal import DraftTree

VOCAB = 30

Path = tuple[int, ...]


def random_tree(rng: random.Random, name: str) -> DraftTree:
    token_ids: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    for _ in range(rng.randrange(12)):
        parent = rng.randrange(-1, len(token_ids))
        token_id = rng.randrange(6)
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            token_ids.append(token_id)
            parents.append(parent)
            survival.append((survival[parent] if parent >= 0 else 1.0) * rng.choice((0.0, 0.3, 0.5, 0.9, 1.0)))
    return DraftTree(tuple(token_ids), tuple(parents), (name,) * len(token_ids), tuple(survival))


def random_successors(rng: random.Random) -> Callable[[int, int], Iterable[tuple[int, float]]]:
    known = {
        (first, second): [(token, rng.random() ** 2) for token in rng.sample(range(8), rng.randrange(4))]
        for first in range(-1, 8)
        for second in range(-1, 8)
        if rng.random() < 0.7
    }
    return lambda first, second: known.get((first, second), ())


def claims(trees: Sequence[DraftTree], sprout: Sprout | None, path: Path) -> dict[int, float]:
    """By definition: the highest chance that anybody gives each token after this path."""
    found: dict[int, float] = {}
    for tree in trees:
        chances = dict(zip(tree.paths(), tree.survival, strict=True)) | {(): 1.0}
        for longer, value in chances.items():
            if longer[:-1] == path and longer:
                chance = value / chances[path] if chances[path] else 0.0
                found[longer[-1]] = max(found.get(longer[-1], 0.0), chance)
    if sprout is not None:
        for token, chance in sprout.successors(*[sprout.previous, sprout.root, *path][-2:]):
            found[token] = max(found.get(token, 0.0), chance)
    return found


@given(seed=st.integers(0, 2**32), num_trees=st.integers(0, 4), cap=st.integers(1, 20), sprouts=st.booleans())
def test_no_better_tree_can_be_made(seed: int, num_trees: int, cap: int, sprouts: bool) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, f"part{i}") for i in range(num_trees)]
    sprout = Sprout("sprout", random_successors(rng), 3, 4) if sprouts else None
    merged = merge(trees, cap, sprout)
    assert merged.fault(VOCAB) is None
    assert len(merged) <= cap
    paths = merged.paths()
    kept = dict(zip(paths, merged.survival, strict=True)) | {(): 1.0}
    left_out = [0.0]
    for path, survival in kept.items():
        for token, chance in claims(trees, sprout, path).items():
            if (*path, token) in kept:
                assert isclose(kept[*path, token], survival * chance)
            else:
                left_out.append(survival * chance)
    if len(merged) < cap:
        assert max(left_out) < LEAST_SURVIVAL
        proposed = {path for tree in trees for path in tree.paths()}
        assert proposed <= set(paths)
    # what a sprout hardly believes in is not looked at, even where a tree offers less
    assert min(merged.survival, default=inf) >= max(left_out) - 1e-12 or max(left_out) < LEAST_SURVIVAL


def test_a_node_is_the_first_ones_that_proposed_it() -> None:
    first = DraftTree.chain((1, 2), "first", (0.5, 0.2))
    second = DraftTree.chain((1, 2, 3), "second", (0.9, 0.8, 0.7))
    sprout = Sprout("sprout", lambda *two: [(1, 0.99), (7, 0.3)] if two == (8, 9) else (), 8, 9)
    merged = merge([first, second], 10, sprout)
    told = dict(zip(merged.paths(), zip(merged.drafters, merged.survival, strict=True), strict=True))
    assert {path: drafter for path, (drafter, _) in told.items()} == {
        (1,): "first",
        (1, 2): "first",
        (1, 2, 3): "second",
        (7,): "sprout",
    }
    assert isclose(told[1,][1], 0.99) and isclose(told[1, 2][1], 0.99 * 0.8 / 0.9)


def test_a_sprout_grows_below_what_others_proposed() -> None:
    chain = DraftTree.chain((5, 6), "chain", (0.9, 0.8))
    after = {(4, 5): [(7, 0.5)], (5, 6): [(8, 0.4)], (6, 8): [(9, 1.0)]}
    merged = merge([chain], 10, Sprout("sprout", lambda *two: after.get(two, ()), 3, 4))
    assert set(merged.paths()) == {(5,), (5, 6), (5, 7), (5, 6, 8), (5, 6, 8, 9)}


def test_nothing_makes_nothing() -> None:
    assert len(merge([], 5)) == len(merge([DraftTree(), DraftTree()], 5)) == 0
