"""Dynamic trees: the best of all nodes, in sound slots, and the target's own draws where the drafter is the target."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import specserve_kernels
import torch
from specserve_drafts.grow import NUM_RIVALS, Level, Root, Shape, TreeGrower
from torch import Tensor

from specserve.proposal import DraftTree, StepResult
from specserve.request import SamplingParams
from specserve.sample import Draw, draw_tokens

OPS = specserve_kernels.load("auto")
VOCAB = 40
Path = tuple[int, ...]


def root(name: str, cap: int, temperature: float = 0.0, max_depth: int = 100) -> Root:
    return Root(name, 20, cap, temperature, seed=zlib.crc32(name.encode()) - 2**63, choice=1, max_depth=max_depth)


@dataclass
class Model:
    """Logits as a function of (tree, path), and the K and V of nodes as a forward would keep them: their paths.

    `checked` counts the rows whose tail was looked up and held just their ancestors.
    """

    roots: Sequence[Root]
    target_ids: Sequence[int] | None = None
    spread: float = 3.0
    broken: frozenset[tuple[int, Path]] = frozenset()
    runs: list[Path] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    checked: int = 0

    def __post_init__(self) -> None:
        self.memory: dict[tuple[int, int], Path] = {}
        self.rows: list[tuple[int, Path]] = [(i, ()) for i in range(len(self.roots))]

    def logits(self, tree: int, path: Path) -> Tensor:
        if (tree, path) in self.broken:
            return torch.full((VOCAB,), math.nan)
        seed = hash((self.roots[tree].root_index, self.roots[tree].seed, path)) % 2**31
        size = VOCAB if self.target_ids is None else len(self.target_ids)
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * self.spread

    def first(self) -> Tensor:
        return torch.stack([self.logits(i, ()) for i in range(len(self.roots))])

    def expand(self, level: Level) -> Tensor:
        self.levels.append(level)
        columns = (level.sequence, level.token_ids, level.depths, level.tails, level.parents, level.slots)
        new = []
        for tree, token_id, depth, tail, parent, slot in zip(*(column.tolist() for column in columns), strict=True):
            above = self.rows[parent]
            path = (*above[1], token_id)
            assert above[0] == tree
            assert len(path) == depth
            assert 0 <= slot < self.roots[tree].cap
            assert tail[depth - 1] == slot
            self.memory[tree, slot] = path
            new.append((tree, path, tail[:depth]))
        for tree, path, tail in new:
            assert [self.memory[tree, slot] for slot in tail] == [path[: i + 1] for i in range(len(path))]
            self.rows.append((tree, path))
            self.checked += 1
        return torch.stack([self.logits(tree, path) for tree, path, _ in new])


def grown(model: Model, shape: Shape, grower: TreeGrower | None = None) -> list[DraftTree]:
    ids = None if model.target_ids is None else torch.tensor(model.target_ids)
    grower = grower or TreeGrower("test", OPS, shape, ids)
    trees = grower.grow(model.roots, model.first(), model.expand)
    for tree, asked in zip(trees, model.roots, strict=True):
        assert tree.fault(VOCAB) is None
        assert len(tree) <= asked.cap
        assert list(tree.survival) == sorted(tree.survival, reverse=True)
        assert max(tree.depths(), default=0) <= min(shape.depth, asked.max_depth)
        assert set(tree.drafters) <= {"test"}
    return trees


def exhaustive(model: Model, tree: int, shape: Shape) -> dict[Path, float]:
    """Survival of every node there can be: products of shares among the best NUM_RIVALS, which is the prior."""
    asked = model.roots[tree]
    found: dict[Path, float] = {}
    frontier: list[tuple[Path, float]] = [((), 1.0)]
    for depth in range(shape.depth):
        children = []
        for path, survival in frontier:
            scores = model.logits(tree, path)
            if asked.temperature:
                index = torch.tensor([asked.root_index + depth + 1])
                noise = OPS.noise(torch.tensor([asked.seed]), index, torch.tensor([asked.choice]), 0, VOCAB)[0]
                scores = scores / asked.temperature + noise
            best = torch.topk(scores, NUM_RIVALS)
            shares = torch.softmax(best.values.double(), 0).tolist()
            for token_id, share in list(zip(best.indices.tolist(), shares, strict=True))[: shape.branch]:
                children.append(((*path, token_id), survival * share))
        found |= dict(children)
        frontier = children
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("cap", [1, 2, 7, 20])
@pytest.mark.parametrize("branch", [2, 4])
def test_the_tree_is_the_best_of_all_trees(cap: int, branch: int, temperature: float) -> None:
    shape = Shape(width=cap, branch=branch, depth=4)
    for case in range(8):
        model = Model([root(f"{case}", cap, temperature)], spread=1.5)
        (tree,) = grown(model, shape)
        every = exhaustive(model, 0, Shape(branch=min(branch, cap), depth=4))
        best = sorted(every, key=lambda path: -every[path])[:cap]
        assert set(tree.paths()) == set(best)
        assert tree.survival == pytest.approx([every[path] for path in tree.paths()])


def test_a_narrow_search_keeps_the_best_of_what_it_saw() -> None:
    model = Model([root("narrow", 12)])
    (tree,) = grown(model, Shape(width=2, branch=3, depth=5))
    every = exhaustive(model, 0, Shape(branch=3, depth=5))
    assert all(len(level.sequence) <= 2 for level in model.levels)
    seen = {(*path, token) for _, path in model.rows for (*parent, token) in every if tuple(parent) == path}
    assert set(tree.paths()) == set(sorted(seen, key=lambda path: -every[path])[:12])


def test_trees_of_a_batch_are_what_they_are_alone() -> None:
    roots = [
        root(f"b{i}", cap, temperature) for i, (cap, temperature) in enumerate([(1, 0), (9, 0.8), (5, 0), (14, 1)])
    ]
    shape = Shape(width=3, branch=4, depth=5)
    together = Model(roots)
    trees = grown(together, shape)
    assert together.checked > 20
    assert trees == [grown(Model([item]), shape)[0] for item in roots]


def test_slots_are_given_anew_when_a_node_falls_out() -> None:
    model = Model([root("slots", 6)], spread=0.7)  # flat: children of many nodes stay close
    grown(model, Shape(width=6, branch=6, depth=6))
    wide = Model([root(f"slots{i}", 5 + i % 3, 0.9) for i in range(30)], spread=3.0)
    grown(wide, Shape(width=4, branch=4, depth=8))
    run = [sum(tree == i for tree, _ in wide.rows) - 1 for i in range(30)]
    assert any(count > asked.cap for count, asked in zip(run, wide.roots, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_drafter_that_is_the_target_guesses_every_draw(temperature: float) -> None:
    model = Model([root(f"same{i}", 6, temperature) for i in range(5)])
    trees = grown(model, Shape(width=1, branch=1, depth=6))
    for i, (tree, asked) in enumerate(zip(trees, model.roots, strict=True)):
        path: Path = ()
        for _ in range(6):
            params = SamplingParams(temperature=temperature)
            draw = Draw(0, asked.root_index + len(path) + 1, asked.choice, asked.seed % 2**64, params)
            path += tuple(draw_tokens(model.logits(i, path)[None], [draw], OPS))
        assert tree.paths()[-1] == path
        assert len(tree) == 6


def test_a_draft_vocabulary_is_mapped_before_the_noise_is_looked_up() -> None:
    ids = sorted(range(3, VOCAB, 2))
    model = Model([root("mapped", 1, 0.9)], target_ids=ids)
    (tree,) = grown(model, Shape(width=1, branch=1, depth=1))
    asked = model.roots[0]
    noise = OPS.noise(torch.tensor([asked.seed]), torch.tensor([21]), torch.tensor([1]), 0, VOCAB)[0]
    scores = model.logits(0, ()) / 0.9 + noise[ids]
    assert tree.token_ids == (ids[int(scores.argmax())],)


def test_bad_logits_cost_that_tree_and_no_other() -> None:
    roots = [root(f"bad{i}", 8, temperature) for i, temperature in enumerate([0, 0.8, 0, 0.8])]
    shape = Shape(width=3, branch=3, depth=4)
    sound = grown(Model(roots), shape)
    late = next(path for path in sound[1].paths() if len(path) == 1)
    model = Model(roots, broken=frozenset({(0, ()), (1, late)}))
    trees = grown(model, shape)
    assert trees == [DraftTree(), DraftTree(), *sound[2:]]

    infinite = Model(roots[:1])
    logits = infinite.first()
    logits[0, 5] = math.inf
    assert TreeGrower("test", OPS, shape).grow(roots[:1], logits, infinite.expand) == [DraftTree()]


def test_ids_that_are_excluded_are_not_proposed() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    model = Model([root("few", 8)])
    (tree,) = TreeGrower("test", OPS, Shape(depth=1)).grow(model.roots, logits, model.expand)
    assert tree.token_ids == (9, 4)


def test_no_deeper_than_the_context_allows() -> None:
    model = Model([root("deep", 6), root("short", 6, max_depth=2), root("none", 6, max_depth=0)], spread=9.0)
    trees = grown(model, Shape(width=1, branch=1, depth=4))
    assert [len(tree) for tree in trees] == [4, 2, 0]


def test_rounds_are_made_while_they_pay() -> None:
    def rounds(cost: float, spread: float) -> int:
        model = Model([root(f"cost{i}", 8) for i in range(4)], spread=spread)
        grown(model, Shape(width=1, branch=1, depth=8, round_cost=cost))
        return len(model.levels)

    assert rounds(0.0, spread=1.5) == 7
    assert 0 < rounds(0.2, spread=1.5) < 7
    assert rounds(50.0, spread=1.5) == 0
    assert rounds(0.2, spread=60.0) == 7


def test_survival_is_learned_from_what_was_committed() -> None:
    """A target that always takes the second guess: with time the tree hangs below second guesses."""
    shape = Shape(width=4, branch=4, depth=3)
    grower = TreeGrower("test", OPS, shape)

    def seconds(model: Model) -> Path:
        path: Path = ()
        for _ in range(3):
            path += (int(model.logits(0, path).topk(2).indices[1]),)
        return path

    reached = []
    for step in range(150):
        model = Model([root(f"learn{step}", 6)], spread=2.0)
        (tree,) = grown(model, shape, grower)
        truth = seconds(model)
        reached.append(max(len(path) for path in [(), *tree.paths()] if path == truth[: len(path)]))
        grower.learn(model.roots[0].sequence_id, StepResult(DraftTree(), (), (*truth, 0)))
    assert np.mean(reached[:10]) < 2
    assert np.mean(reached[-50:]) > 2.5
    survival = grown(Model([root("after", 6)], spread=2.0), shape, grower)[0].survival
    assert survival[0] > 0.8


def test_what_was_not_proposed_teaches_nothing() -> None:
    shape = Shape(width=2, branch=2, depth=2)
    grower = TreeGrower("test", OPS, shape)
    before = grown(Model([root("x", 4)]), shape, grower)
    grower.forget("x")
    grower.learn("x", StepResult(before[0], (0,), (before[0].token_ids[0], 1)))
    grower.learn("never seen", StepResult(before[0], (), (1,)))
    assert grown(Model([root("x", 4)]), shape, grower) == before
