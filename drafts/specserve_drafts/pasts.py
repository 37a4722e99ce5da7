"""From places in known texts that resemble the present one to a draft tree, by calibrated chances.

A *past* is such a place: the tokens before it match what was just said, and what followed them may follow again. At
every node of the tree the pasts whose continuation is the path so far vote on the next token. A vote weighs more the
longer the match, and one unit is left for "something new" (the escape of PPM compressors), so a token's share of the
votes is already close to its chance; the record then corrects it by what really came. The tree grows best first by the
product of these chances. Sources: SuffixDecoding (Oliaro et al., 2024) for trees from several match lengths by
frequency; PPM (Cleary and Witten, 1984) for weighing match lengths against each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from specserve.proposal import EMPTY_TREE, DraftTree
from specserve_drafts.occurrences import LONGEST
from specserve_drafts.record import Record, committed

ENDLESS = 1 << 30
MAX_DEPTH = 64

# By match length, in escapes. Fitted to greedy answers of the demo model by maximum likelihood of the next token, each
# length apart: 0.2, 1.1, 2.4, 3.3, 3.7, 5.8, 6.9, 7.6 for 1 to 8, 17 around 14, 36 from 20 on.
_VOTE = tuple(length**1.5 / 3.0 for length in range(LONGEST + MAX_DEPTH + 1))

# A node less likely than this costs 3 µs here and a row of the target, and comes true in less than 1 step of 100.
_LEAST_SURVIVAL = 0.01

# The record counts shares of votes apart in steps of 1/16.
_NUM_SHARES = 16


class Past(NamedTuple):
    """A place in `tokens`: the token at `start` may come next, then those after it; a negative one ends it.

    After `period` tokens it begins again at `start` (a loop that reaches the present). `length` tokens match before
    it, at most LONGEST. `trust` scales its vote, and the bit `source` says what kind of place it is.
    """

    tokens: Sequence[int]
    start: int
    period: int
    length: int
    trust: float
    source: int


class Draft(NamedTuple):
    """A tree, and of each node the kind of guess that it is, for the record."""

    tree: DraftTree
    kinds: tuple[Hashable, ...]

    def learn(self, record: Record, tokens: Sequence[int]) -> None:
        """Count the guesses that can be judged by the tokens that were committed after the root."""
        for node, hit in committed(self.tree, tokens):
            record.count(self.kinds[node], hit)


NO_DRAFT = Draft(EMPTY_TREE, ())


# a node that may join the tree: (-survival, age, parent, depth, its token, the pasts behind it, its kind); plain
# tuples, since a step makes some 20 of them a sequence
_Branch = tuple[float, int, int, int, int, list[Past], Hashable]


class _Growth:
    """What may still join the tree."""

    def __init__(self, record: Record, mode: Hashable) -> None:
        self.branches: list[_Branch] = []
        self._record = record
        self._mode = mode
        self._age = 0

    def open(self, parent: int, depth: int, survival: float, pasts: list[Past]) -> None:
        """Let what the pasts say comes next compete; `depth` and `survival` are the parent's."""
        total, votes = _count_votes(pasts, depth)
        for token_id, (weight, sources, backers) in votes.items():
            share = weight / total
            kind = (self._mode, sources, int(share * _NUM_SHARES), depth > 0)
            chance = survival * self._record.estimate(kind, share)
            if chance >= _LEAST_SURVIVAL:
                heappush(self.branches, (-chance, self._age, parent, depth + 1, token_id, backers, kind))
                self._age += 1


def _count_votes(pasts: list[Past], depth: int) -> tuple[float, dict[int, tuple[float, int, list[Past]]]]:
    """All votes and the one for something new; of each token its votes, their sources, and the pasts behind them."""
    if len(pasts) == 1:  # most nodes are on nobody else's path
        tokens, start, period, length, trust, source = pasts[0]
        token_id, vote = tokens[start + depth % period], _VOTE[length + depth] * trust
        return 1.0 + vote, {token_id: (vote, source, pasts)} if token_id >= 0 else {}
    total = 1.0
    votes: dict[int, tuple[float, int, list[Past]]] = {}
    for past in pasts:
        tokens, start, period, length, trust, source = past
        token_id = tokens[start + depth % period]
        if token_id < 0:
            continue
        vote = _VOTE[length + depth] * trust
        total += vote
        if token_id in votes:
            weight, sources, backers = votes[token_id]
            backers.append(past)
            votes[token_id] = (weight + vote, sources | source, backers)
        else:
            votes[token_id] = (vote, source, [past])
    return total, votes


def grow(pasts: list[Past], cap: int, record: Record, mode: Hashable, drafter: str) -> Draft:
    """The tree of at most `cap` nodes that these pasts make likeliest, siblings and depths as they come.

    Args:
        pasts: places that resemble the present one, each once.
        record: chances by kind = (mode, sources, share of votes, whether below a node).
        mode: what sets these guesses apart from others of the same drafter (greedy or drawn).
    """
    token_ids: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    kinds: list[Hashable] = []
    growth = _Growth(record, mode)
    growth.open(-1, 0, 1.0, pasts)
    while growth.branches and len(token_ids) < cap:
        minus_survival, _, parent, depth, token_id, backers, kind = heappop(growth.branches)
        token_ids.append(token_id)
        parents.append(parent)
        survival.append(-minus_survival)
        kinds.append(kind)
        if depth < MAX_DEPTH and len(token_ids) < cap:
            growth.open(len(token_ids) - 1, depth, -minus_survival, backers)
    tree = DraftTree(tuple(token_ids), tuple(parents), (drafter,) * len(token_ids), tuple(survival))
    return Draft(tree, tuple(kinds))
