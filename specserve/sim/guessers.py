"""Drafters of the simulator: a tree of guesses in which the truth hides, and any drafter made to fail on demand.

The faults are those that a drafter of ours or of a user can commit: to raise, or to hand out trees that cannot be
verified. None of them may cost more than the draft.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.sim.hashmodel import NUM_DRAWABLE, extend, favourite, key_of
from specserve.sim.script import VOCAB_SIZE


class TreeGuesser:
    """Trees in which the right token is a child with probability `truth` per node, seldom the first child."""

    name = "tree"
    wants_top_ids = False

    def __init__(self, world: str, truth: float) -> None:
        self._world = world
        self._truth = truth
        self._known: dict[str, tuple[int, int]] = {}  # (tokens taken in, their hash)

    def start(self, view: DraftRow) -> None:
        self._known[view.sequence_id] = (0, 0)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._tree(row, cap) for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        """Nothing to learn: `propose` reads what was committed."""

    def stop(self, view: DraftRow) -> None:
        self._known.pop(view.sequence_id, None)

    def _history(self, row: DraftRow) -> int:
        count, history = self._known[row.sequence_id]
        for token in row.token_ids[count:]:
            history = extend(history, token)
        self._known[row.sequence_id] = (len(row.token_ids), history)
        return history

    def _tree(self, row: DraftRow, cap: int) -> DraftTree:
        rng = random.Random(f"{self._world}/{row.sequence_id}/{len(row.token_ids)}")
        key = key_of(row.temperature, row.seed, row.choice)
        ids: list[int] = []
        parents: list[int] = []
        frontier = [(-1, self._history(row), row.token_ids[-1])]
        for parent, history, last in frontier:
            if len(ids) >= cap:
                break
            children = rng.sample(range(VOCAB_SIZE), rng.randrange(3))
            if rng.random() < self._truth:
                truth = favourite(history, last, key)
                children = [token for token in children if token != truth] + [truth]
            for token in children[: cap - len(ids)]:
                frontier.append((len(ids), extend(history, token), token))
                ids.append(token)
                parents.append(parent)
        return DraftTree(tuple(ids), tuple(parents), (self.name,) * len(ids))


class FaultyDrafter:
    """`inner`, until `fault` says otherwise; `live` are the sequences whose state it must hold."""

    def __init__(self, inner: Drafter) -> None:
        self.name = inner.name
        self.wants_top_ids = inner.wants_top_ids
        self.live: set[str] = set()
        self.fault: str | None = None
        self.complaint: str | None = None
        self._inner = inner

    def start(self, view: DraftRow) -> None:
        self._raise_if("start raises")  # then it holds nothing, and must be started again before it is asked
        self.live.add(view.sequence_id)
        self._inner.start(view)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> Sequence[DraftTree]:
        for row, cap in zip(rows, caps, strict=True):
            if cap < 1 or row.sequence_id not in self.live or row.cached_len != len(row.token_ids) - 1:
                self.complaint = f"asked for {cap} nodes of {row.sequence_id}, {row.cached_len} of its tokens cached"
        self._raise_if("propose raises")
        trees = list(self._inner.propose(rows, caps))
        if self._takes("a tree too few"):
            return trees[:-1]
        if self._takes("id outside the vocabulary"):
            trees[-1] = DraftTree.chain([1, VOCAB_SIZE], self.name)
        elif self._takes("parent that comes later"):
            trees[-1] = DraftTree((1, 2), (1, -1), (self.name,) * 2)
        elif self._takes("twins"):
            trees[-1] = DraftTree((1, 1), (-1, -1), (self.name,) * 2)
        elif self._takes("more nodes than asked"):
            trees[-1] = DraftTree.chain([i % NUM_DRAWABLE for i in range(caps[-1] + 40)], self.name)
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._inner.observe(view, result)
        self._raise_if("observe raises")

    def stop(self, view: DraftRow) -> None:
        self.live.discard(view.sequence_id)
        self._inner.stop(view)
        self._raise_if("stop raises")

    def _takes(self, fault: str) -> bool:
        if self.fault != fault:
            return False
        self.fault = None
        return True

    def _raise_if(self, fault: str) -> None:
        if self._takes(fault):
            raise RuntimeError(f"a planted failure: {fault}")
