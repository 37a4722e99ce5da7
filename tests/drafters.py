"""Drafters that no product would ship: the perfect one, the hopeless one, the random, the cheat and the broken.

They know the answers (`sequence_id → prompt + answer`, filled in from a run without speculation), so a test can
force full acceptance, full rejection, or any tree shape. Each counts its calls, so a test can tell that it ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult

Answers = Mapping[str, Sequence[int]]
Noise = Callable[[int, int, int], Sequence[float]]
"""(seed, draw index, choice) → the target's noise of every id."""

GUMBEL_MEDIAN = 0.3665


class CountingDrafter:
    """The protocol with counters; a subclass writes `draft(row, cap)`."""

    name = "counting"
    wants_top_ids = False

    def __init__(self, answers: Answers | None = None) -> None:
        self.answers: Answers = {} if answers is None else answers
        self.num_starts = self.num_proposes = self.num_observes = self.num_stops = 0
        self.num_non_prefix_paths = 0

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        raise NotImplementedError

    def truth(self, row: DraftRow) -> Sequence[int]:
        """What follows the root, to the end of the answer; empty when the row left the known answer."""
        full = self.answers.get(row.sequence_id, ())
        length = len(row.token_ids)
        return full[length:] if list(full[:length]) == list(row.token_ids) else ()

    def start(self, view: DraftRow) -> None:
        self.num_starts += 1

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.num_proposes += 1
        return [self.draft(row, cap) for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self.num_observes += 1
        if result.path != tuple(range(len(result.path))):
            self.num_non_prefix_paths += 1

    def stop(self, view: DraftRow) -> None:
        self.num_stops += 1


class OracleDrafter(CountingDrafter):
    """The true continuation as a chain, no further than the end of the answer: every draft is accepted."""

    name = "oracle"

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        return DraftTree.chain(self.truth(row)[:cap], self.name)


class AlwaysWrongDrafter(CountingDrafter):
    """A chain whose first node is not the truth; the rest is true, to tempt a walk that skips a check."""

    name = "always_wrong"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        super().__init__(answers)
        self.vocab_size = vocab_size

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        truth = self.truth(row)
        if not truth:
            return DraftTree()
        wrong = (truth[0] + 1) % self.vocab_size
        return DraftTree.chain([wrong, *truth[1:]][:cap], self.name)


class RandomTreeDrafter(CountingDrafter):
    """Random trees that mostly hold the truth on a later branch: accepted paths jump over nodes.

    Every other wrong guess is a token that the truth holds further on, so that whoever counts tokens of another
    branch (penalties, bad words) draws something else there. A function of (seed, sequence id, number of tokens)
    alone, so a run can be repeated.
    """

    name = "random_tree"

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        answers: Answers | None = None,
        true_share: float = 0.5,
        num_nodes: int | None = None,
    ) -> None:
        super().__init__(answers)
        self.num_nodes = num_nodes
        self.seed = seed
        self.vocab_size = vocab_size
        self.true_share = true_share

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        rng = random.Random(f"{self.seed}/{row.sequence_id}/{len(row.token_ids)}")
        truth = list(self.truth(row))
        num_nodes = rng.randint(1, cap) if self.num_nodes is None else min(self.num_nodes, cap)
        token_ids: list[int] = []
        parents: list[int] = []
        children: dict[int, set[int]] = {-1: set()}
        true_end, true_depth = -1, 0  # the deepest node whose path is the truth
        for _ in range(num_nodes):
            extend = true_depth < len(truth) and len(token_ids) > 0 and rng.random() < self.true_share
            parent = true_end if extend else rng.randint(-1, len(token_ids) - 1)
            ahead = truth[true_depth : true_depth + 6]
            wrong = rng.choice(ahead) if ahead and rng.random() < 0.5 else rng.randrange(self.vocab_size)
            token_id = truth[true_depth] if extend else wrong
            if token_id in children[parent]:
                continue
            token_ids.append(token_id)
            parents.append(parent)
            children[parent].add(token_id)
            node = len(token_ids) - 1
            children[node] = set()
            if parent == true_end and true_depth < len(truth) and token_id == truth[true_depth]:
                true_end, true_depth = node, true_depth + 1
        return DraftTree(tuple(token_ids), tuple(parents), (self.name,) * len(token_ids))


class AdversarialDrafter(CountingDrafter):
    """Looks at the noise and at the truth, and keeps or drops each guess because of them.

    Under a verification rule that lets drafts bias the draw, this skews the answer; coupled must not care.
    """

    name = "adversarial"

    def __init__(self, answers: Answers, vocab_size: int, noise: Noise) -> None:
        super().__init__(answers)
        self.vocab_size = vocab_size
        self.noise = noise

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        chain: list[int] = []
        for depth, true_id in enumerate(self.truth(row)[:cap]):
            noise = self.noise(row.seed, len(row.token_ids) + depth, row.choice)
            if noise[true_id] > GUMBEL_MEDIAN or true_id % 2 == 0:
                chain.append(true_id)
                continue
            loudest = max((i for i in range(self.vocab_size) if i != true_id), key=lambda i: noise[i])
            chain.append(loudest)
            break
        return DraftTree.chain(chain, self.name)


class RaisingDrafter(CountingDrafter):
    """Raises on every `period`-th `propose`, `observe` and `start`, and asks `inner` otherwise."""

    name = "raising"

    def __init__(self, inner: Drafter, period: int = 3) -> None:
        super().__init__()
        self.inner = inner
        self.period = period
        self.num_raised = 0

    def _maybe_raise(self, count: int, what: str) -> None:
        if count % self.period == 0:
            self.num_raised += 1
            raise ZeroDivisionError(f"planted: {what} call {count}")

    def start(self, view: DraftRow) -> None:
        super().start(view)
        self._maybe_raise(self.num_starts, "start")
        self.inner.start(view)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.num_proposes += 1
        self._maybe_raise(self.num_proposes, "propose")
        return list(self.inner.propose(rows, caps))

    def observe(self, view: DraftRow, result: StepResult) -> None:
        super().observe(view, result)
        self._maybe_raise(self.num_observes, "observe")
        self.inner.observe(view, result)

    def stop(self, view: DraftRow) -> None:
        super().stop(view)
        self.inner.stop(view)


class InvalidTreeDrafter(CountingDrafter):
    """Each call returns the next kind of broken tree, with a sound one in between; `num_broken` counts them."""

    name = "invalid_tree"

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        super().__init__(answers)
        self.vocab_size = vocab_size
        self.num_broken = 0
        self._turn = 0

    def broken(self, kind: int) -> Any:
        names = (self.name,) * 2
        trees: tuple[Any, ...] = (
            DraftTree((self.vocab_size,), (-1,), names[:1]),  # id outside the vocabulary
            DraftTree((-1,), (-1,), names[:1]),  # negative id
            DraftTree((0, 1), (-1, 1), names),  # its own parent
            DraftTree((0, 1), (-1, 5), names),  # a parent that comes later
            DraftTree((0, 1), (-1, -2), names),  # a parent before the root
            DraftTree((2, 2), (-1, -1), names),  # two equal siblings
            DraftTree((0, 1), (-1,), names),  # fields of different lengths
            None,  # no tree at all
            DraftTree((float("nan"),), (-1,), names[:1]),  # type: ignore[arg-type]  # what NaN scores may turn an id into
            DraftTree((1.5,), (-1,), names[:1]),  # type: ignore[arg-type]
        )
        return trees[kind % len(trees)]

    def draft(self, row: DraftRow, cap: int) -> DraftTree:
        self._turn += 1
        if self._turn % 2:
            return DraftTree.chain(self.truth(row)[:cap], self.name)
        self.num_broken += 1
        tree: DraftTree = self.broken(self._turn // 2 - 1)
        return tree


class WrongCountDrafter(CountingDrafter):
    """Returns one tree too few: no tree can be told from another, so the whole call is lost."""

    name = "wrong_count"

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.num_proposes += 1
        return [DraftTree.chain([0], self.name)] * (len(rows) - 1)
