"""How much the controller loses against the best fixed draft length in hindsight, on a clock of its own.

A world has a cost for every step and a truth about every guess; a trace says how many answers run at once, how well
they are guessed, and when that changes, in tokens committed, so that every policy does the same work. The product's
controller plays it, once choosing for itself, and with its length fixed to each K. No engine and no model take part.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from specserve.config import SpeculationConfig
from specserve.controller import Controller
from specserve.costs import Drafted, StepCosts, StepLoad
from specserve.pages import PagePool, PageTable
from specserve.proposal import EMPTY_TREE, DraftTree, StepResult
from specserve.request import Request, SamplingParams, Sequence
from specserve.scheduler import PlannedRows

ANSWER_LEN = 128  # tokens
FIXED_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16)

# one machine, a 2-core Xeon with AMX and a model of 135 M parameters: flat to 16 rows, then a stair each 16
MACHINE = StepCosts(
    curve=tuple(1e-3 * ms for ms in (11.0, *[11.0 + 0.06 * n for n in range(16)], *[13.6 + 0.04 * n for n in range(16)],
                                     *[17.4 + 0.04 * n for n in range(16)], *[19.4 + 0.04 * n for n in range(16)])),
    row=0.35e-3,
    sequence=0.08e-3,
    accepted=0.02e-3,
    context=1e-7,
    node_context=1e-7,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guesses:
    """How well answers are guessed.

    `confidences`: chance of the first guess after each token, one of these at random for each step; a 0 = no proposal.
    `spread`: how far an answer's luck is off that, at most. `siblings`: a tree in which each further sibling has
    `siblings` of what is left, or a chain (0). `estimates`: the exponent that the drafter's estimates are off by (1 =
    right), or None: it has none.
    """

    confidences: tuple[float, ...]
    spread: float = 0.0
    siblings: float = 0.0
    estimates: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """So many answers at once until so many tokens are committed."""

    num_sequences: int
    num_tokens: int
    guesses: Guesses


@dataclass(frozen=True, slots=True)
class World:
    """`slowness` and `noise` (relative) come on top of `costs`; the controller believes `believed`, if that differs.

    `drafting`: seconds of a call, of each sequence and of each node.
    """

    costs: StepCosts = MACHINE
    believed: StepCosts | None = None
    slowness: float = 1.0
    noise: float = 0.03
    drafting: tuple[float, float, float] = (2e-5, 1.2e-4, 1.5e-5)


@lru_cache(maxsize=4096)
def best_tree(confidence: float, siblings: float, size: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Parents and true survivals of the best `size` nodes, best first."""
    parents: list[int] = []
    survivals: list[float] = []
    heap = [(-confidence, -1, 0)]  # (survival, parent, rank)
    while heap and len(parents) < size:
        survival, parent, rank = heappop(heap)
        if -survival < 1e-4:
            break
        node = len(parents)
        parents.append(parent)
        survivals.append(-survival)
        heappush(heap, (survival * confidence, node, 0))
        if siblings:
            above = survivals[parent] if parent >= 0 else 1.0
            heappush(heap, (-above * _chance(confidence, siblings, rank + 1), parent, rank + 1))
    return tuple(parents), tuple(survivals)


def _chance(confidence: float, siblings: float, rank: int) -> float:
    """Of the guess of this rank after a token."""
    return confidence if rank == 0 else (1.0 - confidence) * siblings * (1.0 - siblings) ** (rank - 1)


@lru_cache(maxsize=4096)
def _places(parents: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """The node at (parent, rank among siblings)."""
    ranks: dict[int, int] = {}
    places: dict[tuple[int, int], int] = {}
    for node, parent in enumerate(parents):
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        places[parent, rank] = node
    return places


def _uniform(*key: int) -> float:
    """In [0, 1), a function of the key (Weyl sequence and the finaliser of splitmix64)."""
    state = 0
    for part in key:
        state = (state + part + 1) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return (state ^ state >> 31) / 2**64


_MASK = 2**64 - 1


class _Answer:
    """One running answer and the truth about it: what is right after token t is the same for every policy."""

    def __init__(self, number: int, pool: PagePool) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN)
        request = Request(request_id=str(number), prompt_token_ids=(0,) * 64, params=params)
        self.sequence = Sequence(request=request, choice=0, seed=0, arrival=number, token_ids=[], table=PageTable(pool))
        self.left = ANSWER_LEN
        self._number = number
        self._confidence = 0.0

    def look(self, guesses: Guesses) -> None:
        """What the drafter will know after the token that came last."""
        known = guesses.confidences
        confidence = known[int(_uniform(self._number, self.left) * len(known))]
        if confidence:
            luck = 2.0 * _uniform(self._number) - 1.0
            confidence = min(max(confidence + luck * guesses.spread, 0.01), 0.99)
        self._confidence = round(confidence, 2)

    def propose(self, cap: int, guesses: Guesses) -> DraftTree:
        if not self._confidence or not cap:
            return EMPTY_TREE
        parents, survivals = best_tree(self._confidence, guesses.siblings, cap)
        estimates: tuple[float, ...] = ()
        if guesses.estimates is not None:
            estimates = tuple(survival**guesses.estimates for survival in survivals)
        n = len(parents)
        return DraftTree(tuple(range(n)), parents, ("guess",) * n, estimates)

    def verify(self, tree: DraftTree, guesses: Guesses) -> tuple[int, ...]:
        """The accepted path."""
        path: list[int] = []
        places = _places(tree.parents)
        while path != [] or places:
            draw, rank = _uniform(self._number, self.left, len(path), 7), 0
            while rank < 16 and draw >= (chance := _chance(self._confidence, guesses.siblings, rank)):
                draw -= chance
                rank += 1
            node = places.get((path[-1] if path else -1, rank))
            if node is None:
                break
            path.append(node)
        return tuple(path)


class Game:
    """One policy in one world: the controller's (`num_draft_tokens` None), or a fixed length."""

    def __init__(self, world: World, num_draft_tokens: int | None) -> None:
        config = SpeculationConfig(drafter="ngram", num_draft_tokens=num_draft_tokens)
        self.controller = Controller(config, world.believed or world.costs)
        self.seconds = 0.0
        self.num_steps = self.num_drafting_steps = self.num_asking_steps = self.num_nodes = self.num_accepted = 0
        self._world = world
        self._pool = PagePool(1, 16)
        self._noise = random.Random(0)
        self._answers: list[_Answer] = []
        self._count = 0

    def play(self, trace: SequenceOf[Phase]) -> float:
        """Seconds that the trace takes."""
        for phase in trace:
            left = phase.num_tokens
            while left > 0:
                left -= self._step(phase)
        return self.seconds

    def _step(self, phase: Phase) -> int:
        self._fill(phase.num_sequences)
        answers, guesses = self._answers, phase.guesses
        for answer in answers:
            answer.look(guesses)
        caps = self.controller.budgets([answer.sequence for answer in answers], 0)
        plans = [
            PlannedRows(sequence=a.sequence, num_pending=1, draws=True, node_cap=min(cap, a.left - 1), max_depth=a.left)
            for a, cap in zip(answers, caps, strict=True)
        ]
        proposed = [a.propose(plan.node_cap, guesses) for a, plan in zip(answers, plans, strict=True)]
        trees = self.controller.trim(plans, proposed) if any(caps) else proposed
        paths = [answer.verify(tree, guesses) for answer, tree in zip(answers, trees, strict=True)]
        self._spend(plans, proposed, trees, paths)
        self._settle(plans, trees, paths)
        return sum(1 + len(path) for path in paths)

    def _fill(self, num_sequences: int) -> None:
        """Answers that ended are replaced; those too many leave."""
        for answer in [a for a in self._answers if not a.left] + self._answers[num_sequences:]:
            if answer in self._answers:
                self._answers.remove(answer)
                self.controller.forget(answer.sequence)
        while len(self._answers) < num_sequences:
            self._count += 1
            self._answers.append(_Answer(self._count, self._pool))

    def _spend(
        self,
        plans: SequenceOf[PlannedRows],
        proposed: SequenceOf[DraftTree],
        trees: SequenceOf[DraftTree],
        paths: SequenceOf[tuple[int, ...]],
    ) -> None:
        num_nodes, num_asked = sum(map(len, trees)), sum(1 for plan in plans if plan.node_cap)
        load = StepLoad(
            num_sequences=len(plans),
            num_nodes=num_nodes,
            num_accepted=sum(map(len, paths)),
            context=sum(plan.sequence.table.cached_len for plan in plans),
            node_context=sum(
                plan.sequence.table.cached_len * len(tree) for plan, tree in zip(plans, trees, strict=True)
            ),
        )
        hardship = self._world.slowness * (1.0 + self._noise.uniform(-1.0, 1.0) * self._world.noise)
        seconds = hardship * self._world.costs.seconds(load)
        call, each, node = self._world.drafting
        drafting = hardship * (call + each * num_asked + node * sum(map(len, proposed))) if num_asked else 0.0
        self.controller.measured(
            load, seconds, {"ngram": Drafted(num_asked, sum(map(len, proposed)), 0, drafting)} if num_asked else {}
        )
        self.seconds += seconds + drafting
        self.num_steps += 1
        self.num_asking_steps += num_asked > 0
        self.num_drafting_steps += num_nodes > 0
        self.num_nodes += num_nodes
        self.num_accepted += load.num_accepted

    def _settle(
        self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree], paths: SequenceOf[tuple[int, ...]]
    ) -> None:
        for answer, plan, tree, path in zip(self._answers, plans, trees, paths, strict=True):
            path = path[: answer.left - 1]
            answer.left -= 1 + len(path)
            answer.sequence.table.cached_len += 1 + len(path)
            if plan.node_cap and answer.left:
                self.controller.learn(answer.sequence, StepResult(tree, path, (0,) * (1 + len(path))))


class Regret(NamedTuple):
    """One trace: seconds of the controller's policy, of the best fixed length, and of never drafting."""

    trace: str
    seconds: float
    best_length: int
    best_seconds: float
    off_seconds: float
    num_steps: int
    num_asking_steps: int  # in which some drafter was asked

    @property
    def regret(self) -> float:
        return self.seconds / self.best_seconds - 1.0

    @property
    def against_off(self) -> float:
        return self.seconds / self.off_seconds - 1.0


def regret_of(name: str, world: World, lengths: SequenceOf[int] = FIXED_LENGTHS) -> Regret:
    """Play one of `TRACES` with every policy; 0 must be among the lengths."""
    trace = TRACES[name]
    game = Game(world, None)
    seconds = game.play(trace)
    fixed = {length: Game(world, length).play(trace) for length in lengths}
    best = min(fixed, key=fixed.__getitem__)
    return Regret(name, seconds, best, fixed[best], fixed[0], game.num_steps, game.num_asking_steps)


_LOOKUP = Guesses((0.6, 0.8, 0.0, 0.0), spread=0.2)  # a prompt lookup: half of the steps have a match
_TREE = Guesses((0.9, 0.6, 0.3, 0.3), spread=0.1, siblings=0.4, estimates=1.0)
_OVERCONFIDENT = Guesses((0.8, 0.6, 0.3, 0.2), spread=0.1, siblings=0.4, estimates=0.8)
_GOOD, _BAD = Guesses((0.8, 0.8, 0.6, 0.0)), Guesses((0.1, 0.0))
_GOOD_TREE = Guesses((0.9, 0.6, 0.3), siblings=0.4, estimates=1.0)
_BAD_TREE = Guesses((0.05,), siblings=0.4, estimates=0.3)
_WRONG = Guesses((0.01,))

TRACES: dict[str, tuple[Phase, ...]] = {
    **{
        f"stationary, {kind}, {n} running": (Phase(n, 2000 + 1000 * n, guesses),)
        for kind, guesses in (("lookup", _LOOKUP), ("tree", _TREE), ("overconfident tree", _OVERCONFIDENT))
        for n in (1, 4, 16, 32)
    },
    **{
        f"step change of acceptance, {kind}, {n} running": tuple(
            Phase(n, 1500 + 400 * n, guesses) for guesses in (good, bad, good, bad)
        )
        for kind, good, bad in (("lookup", _GOOD, _BAD), ("tree", _GOOD_TREE, _BAD_TREE))
        for n in (1, 8, 16)
    },
    **{
        f"step change of load, {kind}": tuple(Phase(n, 1000 + 200 * n, guesses) for n in (1, 24, 2, 32))
        for kind, guesses in (("lookup", _LOOKUP), ("tree", _TREE))
    },
    **{
        f"bursty load, {kind}": tuple(Phase(n, 300 + 40 * n, guesses) for _ in range(5) for n in (1, 32))
        for kind, guesses in (("lookup", _LOOKUP), ("tree", _TREE))
    },
    **{f"nothing accepted, {n} running": (Phase(n, 2000 + 400 * n, _WRONG),) for n in (1, 4, 8, 16, 32)},
}
