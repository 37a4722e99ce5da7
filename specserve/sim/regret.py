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

from specserve.config import SpeculationConfig
from specserve.controller import Controller
from specserve.costs import StepCosts, StepLoad
from specserve.pages import PagePool, PageTable
from specserve.proposal import DraftTree, StepResult
from specserve.request import Request, SamplingParams, Sequence
from specserve.scheduler import PlannedRows

ANSWER_LEN = 128  # tokens
FIXED_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

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
    drafting: tuple[float, float, float] = (2e-5, 8e-5, 5e-6)


@lru_cache(maxsize=4096)
def _tree(confidence: float, siblings: float, size: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Parents, ranks among siblings and true survivals of the best `size` nodes, best first."""
    parents: list[int] = []
    ranks: list[int] = []
    survivals: list[float] = []
    heap = [(-confidence, -1, 0)]  # (survival, parent, rank)
    while heap and len(parents) < size:
        survival, parent, rank = heappop(heap)
        if -survival < 1e-4:
            break
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        survivals.append(-survival)
        heappush(heap, (survival * confidence, node, 0))
        if siblings:
            above = survivals[parent] if parent >= 0 else 1.0
            heappush(heap, (-above * _chance(confidence, siblings, rank + 1), parent, rank + 1))
    return tuple(parents), tuple(ranks), tuple(survivals)


def _chance(confidence: float, siblings: float, rank: int) -> float:
    """Of the guess of this rank after a token."""
    return confidence if rank == 0 else (1.0 - confidence) * siblings * (1.0 - siblings) ** (rank - 1)


class _Answer:
    """One running answer and the truth about it: what is right after token t is the same for every policy."""

    def __init__(self, number: int, trace: str, pool: PagePool) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN)
        request = Request(request_id=f"{trace}-{number}", prompt_token_ids=(0,) * 64, params=params)
        self.sequence = Sequence(request=request, choice=0, seed=0, arrival=number, token_ids=[], table=PageTable(pool))
        self.left = ANSWER_LEN
        self.luck = random.Random(request.request_id).uniform(-1.0, 1.0)
        self._confidence = 0.0
        self._rng = random.Random()

    def look(self, guesses: Guesses) -> None:
        """What the drafter and the target will do after the token that came last."""
        self._rng.seed(f"{self.sequence.request.request_id}/{self.left}")
        confidence = self._rng.choice(guesses.confidences)
        if confidence:
            confidence = min(max(confidence + self.luck * guesses.spread, 0.01), 0.99)
        self._confidence = round(confidence, 2)

    def propose(self, cap: int, guesses: Guesses) -> DraftTree:
        if not self._confidence or not cap:
            return DraftTree()
        parents, _, survivals = _tree(self._confidence, guesses.siblings, cap)
        estimates: tuple[float, ...] = ()
        if guesses.estimates is not None:
            estimates = tuple(survival**guesses.estimates for survival in survivals)
        n = len(parents)
        return DraftTree(tuple(range(n)), parents, ("guess",) * n, estimates)

    def verify(self, tree: DraftTree, guesses: Guesses) -> tuple[int, ...]:
        """The accepted path."""
        if not len(tree):
            return ()
        ranks: dict[int, int] = {}
        children: dict[tuple[int, int], int] = {}
        for node, parent in enumerate(tree.parents):
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            children[parent, rank] = node
        path: list[int] = []
        while True:
            draw, rank, at = self._rng.random(), 0, path[-1] if path else -1
            while rank < 16 and draw >= _chance(self._confidence, guesses.siblings, rank):
                draw -= _chance(self._confidence, guesses.siblings, rank)
                rank += 1
            if (at, rank) not in children:
                return tuple(path)
            path.append(children[at, rank])


def play(trace: SequenceOf[Phase], world: World, num_draft_tokens: int | None, name: str = "trace") -> float:
    """Seconds that the trace takes; `num_draft_tokens` None = the controller chooses."""
    return Game(world, num_draft_tokens, name).play(trace)


class Game:
    """One policy in one world."""

    def __init__(self, world: World, num_draft_tokens: int | None, name: str) -> None:
        costs = world.believed or world.costs
        self.controller = Controller(SpeculationConfig(drafter="ngram", num_draft_tokens=num_draft_tokens), costs)
        self.seconds = 0.0
        self.num_steps = self.num_drafting_steps = self.num_nodes = 0
        self._world = world
        self._name = name
        self._pool = PagePool(1, 16)
        self._noise = random.Random(name)
        self._answers: list[_Answer] = []
        self._count = 0

    def play(self, trace: SequenceOf[Phase]) -> float:
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
            self._answers.append(_Answer(self._count, self._name, self._pool))

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
        self.controller.measured(load, seconds, {"ngram": (num_asked, drafting)} if num_asked else {})
        self.seconds += seconds + drafting
        self.num_steps += 1
        self.num_drafting_steps += num_nodes > 0
        self.num_nodes += num_nodes

    def _settle(
        self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree], paths: SequenceOf[tuple[int, ...]]
    ) -> None:
        for answer, plan, tree, path in zip(self._answers, plans, trees, paths, strict=True):
            path = path[: answer.left - 1]
            answer.left -= 1 + len(path)
            answer.sequence.table.cached_len += 1 + len(path)
            if plan.node_cap and answer.left:
                self.controller.learn(answer.sequence, StepResult(tree, path, (0,) * (1 + len(path))))
