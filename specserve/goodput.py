"""Tokens a second of a whole step: which draft nodes raise them most.

A step with more nodes commits more tokens and takes longer. Both are expected values, the tokens from the nodes' chance
of survival, the seconds from measured costs, and their quotient is what is maximised. Before anything is proposed it is
known how many nodes of each level of survival to expect (`best_level`), afterwards what there is (`best_prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from operator import mul, sub
from typing import NamedTuple

from specserve.costs import StepCosts, StepLoad
from specserve.survival import LEVELS

MARGIN = 1.01  # drafting must promise so much more than not drafting


class Asking(NamedTuple):
    """Seconds of drafting: of all trees, of each node asked for; and how many nodes will be asked for at most."""

    trees: float
    node: float
    most_nodes: float


class Choice(NamedTuple):
    """Draft nodes of survival `LEVELS[level]` and better (-1: none).

    `rate`: tokens a second of the whole step; `nodes`: how many there will be; `worth[i]`: tokens that a node of level
    i gains, after the price of its rows.
    """

    level: int
    rate: float
    nodes: float
    worth: tuple[float, ...]

    def gain(self, counts: SequenceOf[float]) -> float:
        """Tokens gained by a sequence that offers so many nodes of each level."""
        return sum(map(mul, self.worth, counts), 0.0)

    def wanted(self, counts: SequenceOf[float]) -> float:
        """How many of a sequence's nodes will be taken."""
        return sum(counts[: self.level + 1])


def asked_for(wanted: float, num_trees: int = 1) -> float:
    """Nodes to ask for where so many are expected to be taken: what trees offer changes from step to step."""
    return 2.0 * wanted + 2.0 * num_trees


def best_level(
    counts: SequenceOf[SequenceOf[float]], load: StepLoad, costs: StepCosts, asking: Asking, extra: float
) -> Choice:
    """The level of survival down to which nodes are to be drafted.

    Args:
        counts: expected nodes of each level, for each sequence that may draft.
        load: the step without them.
        extra: seconds of a node, beside those of its row.
    """
    plain, num_rows, rows = costs.seconds(load), load.num_rows, costs.rows
    base, num_trees = rows(num_rows), len(counts)
    rate, best, price, most = MARGIN * load.num_sequences / plain, -1, 0.0, 0.0
    nodes = accepted = 0.0
    for level, count in enumerate(map(sum, zip(*counts, strict=True))):
        nodes += count
        accepted += count * LEVELS[level]
        asked = min(asked_for(nodes, num_trees), asking.most_nodes)
        more = rows(num_rows + nodes) - base + nodes * extra
        drafting = asking.trees + asking.node * asked
        reached = (load.num_sequences + accepted) / (plain + drafting + more + accepted * costs.accepted)
        if reached > rate:
            rate, best, price, most = reached, level, reached * more / nodes, nodes
    worth = tuple(survival * (1.0 - rate * costs.accepted) - price for survival in LEVELS[: best + 1])
    return Choice(best, rate, most, worth)


def best_prefix(worths: SequenceOf[float], num_rows: int, rate: float, costs: StepCosts) -> list[bool]:
    """Which nodes to keep: of all prefixes of the nodes in descending order of worth, the one that gains most.

    Args:
        worths: expected tokens of each node, less what it costs beside its row, at `rate`; ancestors come first.
        num_rows: rows of the step without these nodes.
        rate: tokens a second that a second is worth.

    All prefixes are tried, since the seconds of rows are a staircase.
    """
    order = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)
    prices = [rate * seconds for seconds in costs.further_rows(num_rows, len(order))]
    gains = list(map(sub, accumulate(map(worths.__getitem__, order), initial=0.0), prices))
    kept = [False] * len(order)
    for node in order[: gains.index(max(gains))]:
        kept[node] = True
    return kept
