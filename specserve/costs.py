"""What a step costs: the frozen record of a machine's measured seconds, and a drafter's own, followed on line.

A step's seconds are a curve over its rows and a few slopes (`StepCosts`), measured at start-up by specserve/sweep.py.
A machine that gets busy later slows all of them alike: one scale is followed (`FollowedCosts`). Choices compare seconds
with seconds and do not depend on it; predictions do.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple


class StepLoad(NamedTuple):
    """What one step carries; `context` counts cached tokens, summed over sequences, `node_context` over nodes."""

    num_sequences: int
    num_nodes: int = 0
    num_prompt_rows: int = 0
    num_accepted: int = 0
    context: int = 0
    node_context: int = 0
    num_sampled: int = 0  # rows that are drawn from with noise

    @property
    def num_rows(self) -> int:
        return self.num_sequences + self.num_nodes + self.num_prompt_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a whole engine step, from its plan to its events, drafting apart.

    `curve[n]`: one short greedy sequence with n rows, n >= 1 (`curve[0]` = `curve[1]`); never falls. The rest comes on
    top: each row beyond the curve, each further sequence, each accepted node, each cached token of a sequence and
    of each of its nodes, each row that is drawn from with noise.
    """

    curve: tuple[float, ...]
    row: float
    sequence: float = 0.0
    accepted: float = 0.0
    context: float = 0.0
    node_context: float = 0.0
    sampled: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "curve", tuple(self.curve))
        slopes = (self.row, self.sequence, self.accepted, self.context, self.node_context, self.sampled)
        if len(self.curve) < 2 or not 0 < self.curve[0] <= self.curve[1] or list(self.curve) != sorted(self.curve):
            raise ValueError(f"the curve must hold seconds for 0, 1, … rows and never fall; it is {self.curve}")
        if min(slopes) < 0:
            raise ValueError(f"a slope is negative: {slopes}")

    def rows(self, num_rows: float) -> float:
        """Seconds of so many rows of one short sequence; of an expected number, between its neighbours."""
        last = len(self.curve) - 1
        if num_rows >= last:
            return self.curve[last] + (num_rows - last) * self.row
        whole = int(num_rows)
        return self.curve[whole] + (num_rows - whole) * (self.curve[whole + 1] - self.curve[whole])

    def further_rows(self, num_rows: int, count: int) -> list[float]:
        """Seconds that 0, 1, …, `count` rows add to `num_rows`."""
        base, last, row = self.rows(num_rows), len(self.curve) - 1, self.row
        added = [seconds - base for seconds in self.curve[num_rows : num_rows + count + 1]]
        beyond = self.curve[last] - base - last * row
        return added + [beyond + n * row for n in range(num_rows + len(added), num_rows + count + 1)]

    def corrected(self, factors: Sequence[float]) -> StepCosts:
        """With each tile of the curve so many times as long; it still never falls. Rows beyond it are like its last."""
        seconds = [value * factors[max(n - 1, 0) // TILE] for n, value in enumerate(self.curve)]
        return replace(self, curve=tuple(accumulate(seconds, max)), row=self.row * factors[-1])

    def seconds(self, load: StepLoad) -> float:
        """What a step with this load takes on the machine as it was measured."""
        return (
            self.rows(load.num_rows)
            + max(load.num_sequences - 1, 0) * self.sequence
            + load.num_accepted * self.accepted
            + load.context * self.context
            + load.node_context * self.node_context
            + load.num_sampled * self.sampled
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepCosts:
        """Raises ValueError or TypeError if `text` was not made by `to_json`."""
        return cls(**json.loads(text))


TILE = 16  # rows; where kernels step up


class FollowedCosts:
    """The costs as they are now. `scale`: how many times as long as at start-up steps take, whatever they carry.

    A sweep of two seconds on a busy machine gets the curve's shape right to some 10 %, which is what drafting gains or
    loses on a loaded one. So where steps of different sizes alternate, the sizes' seconds are compared, and the curve
    corrected tile by tile. Sizes that do not alternate tell nothing: they would compare two states of the machine.
    """

    WINDOW, NEAR, REFRESH = 31, 16, 8  # steps
    RATE, MOST = 0.1, 1.4  # of a comparison, and how far off it counts as being

    def __init__(self, measured: StepCosts) -> None:
        self.measured = measured
        self.now = measured
        self.scale = 1.0
        self.factors = [1.0] * -(-(len(measured.curve) - 1) // TILE)  # of each tile of the curve
        self._ratios: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self._count = 0

    def tile(self, num_rows: float) -> int:
        """The tile of rows of a step; all beyond the curve count as its last."""
        return min(int(num_rows - 1) // TILE, len(self.factors) - 1)

    def follow(self, load: StepLoad, seconds: float) -> None:
        """One step without prompt rows; a clock that stands still tells nothing."""
        if seconds <= 0.0:
            return
        tile, ratio = self.tile(load.num_rows), seconds / self.measured.seconds(load)
        near = list(self._ratios)[-self.NEAR :]
        others = [other / self.factors[i] for i, other in near if i != tile]
        if others:
            off = ratio / self.factors[tile] / median(others)
            rate = self.RATE * len(others) / self.NEAR
            change = min(max(off, 1.0 / self.MOST), self.MOST) ** rate
            # what one tile gains the others lose: steps stall and never hurry, and all factors would creep upwards
            tiles = {tile, *(i for i, _ in near)}
            for i in tiles:
                self.factors[i] *= change ** ((i == tile) - 1.0 / len(tiles))
        self._ratios.append((tile, ratio))
        self._count += 1
        if self._count % self.REFRESH == 0 or self._count < self.REFRESH:
            self.scale = median([other / self.factors[i] for i, other in self._ratios])
            self.now = self.measured.corrected(self.factors)


SIZES = (1, 2, 4, 8, 16, 32, 64)


class Drafted(NamedTuple):
    """What one drafter took in a step for so many trees and their nodes; of `num_new` sequences it hardly knew."""

    num_trees: int
    num_nodes: int
    num_new: int
    seconds: float


TREE_NODES = 7.0  # a tree takes as long as so many nodes, and its nodes on top (`auto` on one core: 140 and 20 us)
SPREAD = 64  # calls that a sequence's first ones are spread over


class DraftSeconds:
    """What a drafter takes for n trees at once, followed for a few sizes of n, and what a new sequence adds.

    More trees never take less, and n times as many never take more than n times as long. So each figure bounds all
    others, which keeps a stale one from standing for ever, and where nothing is known the lower bound is assumed:
    a drafter is tried before it is dismissed. The first calls for a sequence take in its prompt.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self._rate = rate
        self._known: list[float | None] = [None] * len(SIZES)  # of n trees, for one node's share of each
        self.start = 0.0  # seconds that a new sequence takes beyond the usual, spread over its calls

    def follow(self, drafted: Drafted) -> None:
        """One step. Its seconds count at most double what was expected: machines stall."""
        at = _size_of(drafted.num_trees)
        per_tree = TREE_NODES + drafted.num_nodes / drafted.num_trees
        if drafted.num_new:
            start = max(drafted.seconds - per_tree * self._usual(at), 0.0) / drafted.num_new / SPREAD
            self.start += (self._rate if self.start else 1.0) * (start - self.start)
            return
        known, seconds = self._known[at], drafted.seconds / per_tree
        if known is None:
            self._known[at] = min(seconds, 2.0 * self._bounds(at)[1])
        else:
            self._known[at] = known + self._rate * (min(seconds, 2.0 * known) - known)
        for i, other in enumerate(self._known):
            if other is not None and i != at:
                low, high = self._bounds(i, of=[at])
                self._known[i] = min(other + self._rate * (max(other, low) - other), high)

    def _bounds(self, at: int, of: Sequence[int] = range(len(SIZES))) -> tuple[float, float]:
        """The least and the most that a size can take by what others do."""
        low, high = 0.0, inf
        for i in of:
            known, ratio = self._known[i], SIZES[at] / SIZES[i]
            if known is not None and i != at:
                low = max(low, known * min(ratio, 1.0))
                high = min(high, known * max(ratio, 1.0))
        return low, high

    def _usual(self, at: int) -> float:
        known = self._known[at]
        return self._bounds(at)[0] if known is None else known

    def node(self, num_trees: int) -> float:
        """Seconds of one more node in one of so many trees, at least; 0 as long as nothing is known."""
        return self._usual(_size_of(num_trees)) / num_trees

    def tree(self, num_trees: int) -> float:
        """Seconds of one of so many trees, without its nodes, and its share of starting."""
        return TREE_NODES * self.node(num_trees) + self.start


def _size_of(num_trees: int) -> int:
    """Place in `SIZES` of the nearest one that is not larger."""
    return max(i for i, size in enumerate(SIZES) if size <= max(num_trees, 1))


def monotone(measured: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """A curve over 0, 1, … rows through measured (rows, seconds), ascending in rows.

    Noise only ever adds time, and fewer rows never take longer: a point counts as the least of it and all later ones.
    """
    seconds, least = [], float("inf")
    for _, value in reversed(measured):
        least = min(least, value)
        seconds.append(least)
    seconds.reverse()
    curve = [seconds[0]] * (measured[0][0] + 1)
    for (low, _), (high, _), below, above in zip(measured, measured[1:], seconds, seconds[1:], strict=False):
        curve += [min(below + (above - below) * (n - low) / (high - low), above) for n in range(low + 1, high + 1)]
    return tuple(curve)
