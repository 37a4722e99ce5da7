"""What the target made of a drafter's guesses so far, and what its next tree will probably be worth.

A drafter estimates the chance that a node survives verification. A `Prospect` compares its estimates with outcomes and
corrects the next ones, apart for the first level of the trees and for all deeper ones; a drafter without estimates is
taken to say 1 everywhere, so that the correction is all. It also follows what trees have offered lately: how many
nodes of which survival. There is one per sequence, shrunk to that of its drafter, which all its sequences share.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from specserve.config import MAX_NUM_DRAFT_TOKENS
from specserve.proposal import DraftTree

# nodes are sorted into levels of survival by these lower edges (in percent); a node of level i counts as LEVELS[i]
EDGES = (95, 88, 80, 70, 58, 45, 33, 22, 13, 6, 2, 0)
LEVELS = (0.975, 0.915, 0.84, 0.75, 0.64, 0.515, 0.39, 0.275, 0.175, 0.095, 0.04, 0.01)
_LEVEL_OF = tuple(next(i for i, edge in enumerate(EDGES) if percent >= edge) for percent in range(101))

OPTIMISM = 0.7  # chance of a node under an accepted one, before anything is known of a drafter without estimates
OPTIMISTIC_NODES = 8
PRIOR_WEIGHT, OWN_PRIOR_WEIGHT = 3.0, 8.0  # in estimated acceptances
SHARED_FADING, OWN_FADING = 0.99, 0.95  # of evidence, by each tree
SHARED_RATE, OWN_RATE = 0.02, 0.15  # of averages, by each tree
PEAK_FADING, GROWTH = 0.9, 1.5

PROBE_NODES, PROBE_WEIGHT, PROBE_TREES = 4, 4.0, 10.0
QUIET_STEPS = 8  # so long a "nobody drafts" stands in an unchanged batch
PATIENCE, MAX_PATIENCE = 16, 512  # in so many steps a sequence that rests forgets why; doubled each time


class Outcome(NamedTuple):
    """Of one verified tree: nodes accepted and estimated to be, at the first level, and below accepted nodes."""

    first: float
    first_estimate: float
    deeper: float
    deeper_estimate: float


def outcome(tree: DraftTree, path: SequenceOf[int]) -> Outcome:
    """What came of a tree; only nodes under the root or an accepted node were put to the test."""
    estimates, on_path = tree.survival, set(path)
    first = deeper = 0.0
    for node, parent in enumerate(tree.parents):
        if parent < 0:
            first += estimates[node] if estimates else 1.0
        elif parent in on_path:
            deeper += estimates[node] / max(estimates[parent], 1e-9) if estimates else 1.0
    return Outcome(float(bool(path)), first, float(max(len(path) - 1, 0)), deeper)


def level_counts(survivals: SequenceOf[float]) -> list[float]:
    """Number of nodes on each level."""
    counts = [0.0] * len(EDGES)
    for value in survivals:
        counts[_LEVEL_OF[int(100 * value)]] += 1.0
    return counts


class Prospect:
    """Correction and outlook of one sequence or, without `shared`, of all sequences of a drafter.

    `first`, `deeper`: accepted ÷ estimated. `counts[i]`: nodes of survival level i that the next tree will have.
    `peak`: the most nodes that it makes sense to ask for: some more than were worth their rows lately.
    """

    def __init__(self, shared: Prospect | None = None) -> None:
        self.shared = shared
        self._hits = self._tried = self._deep_hits = self._deep_tried = self._trees = 0.0
        self._fading, self._rate = (SHARED_FADING, SHARED_RATE) if shared is None else (OWN_FADING, OWN_RATE)
        self._prior = 1.0
        self._met = False
        if shared is None:
            self.counts = level_counts([OPTIMISM**depth for depth in range(1, OPTIMISTIC_NODES + 1)])
            self.peak = float(OPTIMISTIC_NODES)
        else:
            self.counts, self.peak = list(shared.counts), shared.peak
        self.first = self.deeper = 1.0
        self.correct()

    def _meet(self, tree: DraftTree) -> None:
        """The drafter's first tree tells whether it estimates survival at all."""
        if self.shared is not None:
            if not self.shared._met:
                self.shared._meet(tree)
        else:
            self._prior = 1.0 if tree.survival else OPTIMISM
        self._met = True
        self.correct()

    def correct(self) -> None:
        """Weigh the evidence against the prior."""
        shared = self.shared
        first, deeper = (self._prior, self._prior) if shared is None else (shared.first, shared.deeper)
        weight = PRIOR_WEIGHT if shared is None else OWN_PRIOR_WEIGHT
        self.first = (self._hits + weight * first) / (self._tried + weight)
        self.deeper = (self._deep_hits + weight * deeper) / (self._deep_tried + weight)

    @property
    def most_nodes(self) -> float:
        """Nodes that its next tree will have, asked for as many as make sense."""
        return min(self.peak, sum(self.counts))

    @property
    def acceptance(self) -> float:
        """Share of verified trees of which a node was accepted, lately."""
        shared = OPTIMISM if self.shared is None else self.shared.acceptance
        return (self._hits + PRIOR_WEIGHT * shared) / (self._trees + PRIOR_WEIGHT)

    def count(self, seen: Outcome) -> None:
        """One more verified tree."""
        fading = self._fading
        self._hits = self._hits * fading + seen.first
        self._tried = self._tried * fading + seen.first_estimate
        self._trees = self._trees * fading + 1.0
        if seen.deeper_estimate:
            self._deep_hits = self._deep_hits * fading + seen.deeper
            self._deep_tried = self._deep_tried * fading + seen.deeper_estimate
        self.correct()

    def doubt(self, weight: float) -> None:
        """Let the evidence weigh no more than so many estimated acceptances, so that what comes next decides."""
        if self._tried > weight:
            self._forget(1.0 - weight / self._tried)

    def rest(self, share: float) -> None:
        """While nothing is drafted: forget a share of what is known of this sequence, and lean on what all share."""
        assert self.shared is not None
        self._forget(share)
        self.counts = [mine + share * (its - mine) for mine, its in zip(self.counts, self.shared.counts, strict=True)]
        self.peak += share * (self.shared.peak - self.peak)
        self.correct()

    def _forget(self, share: float) -> None:
        keep = 1.0 - share
        self._hits, self._tried, self._trees = self._hits * keep, self._tried * keep, self._trees * keep
        self._deep_hits, self._deep_tried = self._deep_hits * keep, self._deep_tried * keep

    def offered(self, counts: SequenceOf[float], weight: float) -> None:
        """The levels of a proposed tree, which stands for `weight` trees."""
        rate = min(self._rate * weight, 0.5)
        self.counts = [mine + rate * (its - mine) for mine, its in zip(self.counts, counts, strict=True)]

    def survival(self, tree: DraftTree) -> list[float]:
        """Corrected survival of each node, never above its parent's."""
        estimates, parents = tree.survival, tree.parents
        if not parents:
            return []
        if not self._met:
            self._meet(tree)
        first, deeper, n = self.first, self.deeper, len(parents)
        if not estimates:
            first, deeper = min(first, 1.0), min(deeper, 1.0)
        if parents == tuple(range(-1, n - 1)):
            factors = list(accumulate(repeat(deeper, n - 1), mul, initial=first))
        else:
            factors = []
            for parent in parents:
                factors.append(first if parent < 0 else factors[parent] * deeper)
        if not estimates:
            return factors
        values = list(map(mul, estimates, factors))
        return values if first <= 1.0 and deeper <= 1.0 else _bounded(values, parents)


def _bounded(values: list[float], parents: SequenceOf[int]) -> list[float]:
    """No more than 1, and than the parent's."""
    for node, parent in enumerate(parents):
        most = 1.0 if parent < 0 else values[parent]
        if values[node] > most:
            values[node] = most
    return values


class Track:
    """What the controller keeps of one sequence: its cap, its prospect, and since when it rests.

    `fixed`: its cap is not the controller's choice. `sampled`: its rows are drawn with noise. `why`: rows of the step
    and acceptance when it got nothing.
    """

    def __init__(self, drafter: str, fixed: int | None, sampled: bool, shared: Prospect, now: int) -> None:
        self.drafter = drafter
        self.fixed = fixed
        self.sampled = sampled
        self.shared = shared
        self.prospect = Prospect(shared)
        self.cap = fixed or 0
        self.probing = False
        self.rested_at = now
        self.why: tuple[int, float] | None = None
        self._patience = PATIENCE

    def rest(self, now: int) -> None:
        """Not asked for a while: lean on what others see meanwhile."""
        idle = now - self.rested_at
        if not self.cap and idle >= QUIET_STEPS:
            self.prospect.rest(min(idle / self._patience, 1.0))
            self.rested_at = now

    def give(self, cap: int, now: int, num_rows: int) -> None:
        """Its cap from now on; 0 = it rests."""
        if self.cap and not cap:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self.rested_at = now
        if not cap:
            self.why = (num_rows, self.prospect.acceptance)
        self.cap, self.probing = min(cap, MAX_NUM_DRAFT_TOKENS), False

    def probe(self) -> None:
        """Ask once although it does not pay."""
        self.cap, self.probing = PROBE_NODES, True

    def saw(self, survivals: SequenceOf[float], num_worth: int, weight: float) -> None:
        """A proposed tree that stands for `weight` of them (0: not looked at), and how many nodes were worth it."""
        full = num_worth == len(survivals) >= self.cap
        self.prospect.peak = (
            GROWTH * num_worth + 1.0 if full else max(self.prospect.peak * PEAK_FADING, num_worth + 1.0)
        )
        self.shared.peak += SHARED_RATE * (self.prospect.peak - self.shared.peak)
        if weight:
            counts = level_counts(survivals)
            self.prospect.offered(counts, weight)
            self.shared.offered(counts, weight)

    def learn(self, seen: Outcome | None) -> None:
        """What the target made of a tree, if there was one; what a probe tells outweighs what was known."""
        probed, self.probing = self.probing, False
        if probed:
            self.cap = 0
        if seen is None:
            return
        if probed:
            self.prospect.doubt(PROBE_WEIGHT)
            self.shared.doubt(PROBE_WEIGHT)
        if seen.first:
            self._patience = PATIENCE
        self.shared.count(seen)
        self.prospect.count(seen)


class Probes:
    """When a batch that drafts nothing tries a draft after all: in the long run at most every hundredth step.

    A first probe that fails doubles the time to the next. As long as at least half of them do better than was thought
    they go on, step after step, and what they took is waited for afterwards.
    """

    PERIOD, MAX_PERIOD, MAX_RUN = 100, 200, 16  # steps

    def __init__(self) -> None:
        self._at = 0
        self._period = self.PERIOD
        self._sent = self._better = 0  # in this run

    def due(self, step: int) -> bool:
        return step >= self._at

    def sent(self, step: int) -> None:
        self._sent += 1
        self._at = step + max(self._period, self.PERIOD * self._sent)

    def came_back(self, step: int, better: bool) -> None:
        self._better += better
        if 2 * self._better >= self._sent and self._sent < self.MAX_RUN:
            self._period, self._at = self.PERIOD, step + 1
            return
        if not self._better:
            self._period = min(2 * self._period, self.MAX_PERIOD)
        self._sent = self._better = 0

    def drafting(self, step: int) -> None:
        """Drafts pay again, without probes."""
        self._period, self._at = self.PERIOD, step + self.PERIOD
        self._sent = self._better = 0
