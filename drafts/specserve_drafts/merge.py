"""One tree from many: the guesses of several drafters, best first, and every path only once.

A node's chance given its parent is the highest that anybody claims for it, so two drafters that agree share a node and
those that differ fill the tree's width. Whoever can guess from the last two tokens alone grows on below everybody's
nodes. Of the ways to combine claims, the highest was as good as any (greedy answers of the demo model, suffix and
recycling, 15 nodes): acceptance length 2.42; learned from how often each pair of claims came true 2.42; as independent
events 2.37; with recycling sharing what suffix leaves over 2.40; logistic mixing, learned on line, 2.43.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from specserve.proposal import DraftTree

Successors = Callable[[int, int], Iterable[tuple[int, float]]]
"""What may follow two tokens: (id, chance), each id once."""

Places = Sequence[tuple[int, int]]
"""(tree, node) each, -1 = the root."""

# A node less likely than this comes true in less than one step of 200; leaving such out costs nothing at 63 nodes.
LEAST_SURVIVAL = 0.005


class Sprout(NamedTuple):
    """A drafter that can grow on anywhere, and the two tokens that end with the root.

    A node that it shares with those that it `outranks` is its own.
    """

    drafter: str
    successors: Successors
    previous: int
    root: int
    outranks: tuple[str, ...] = ()


class _Claim:
    """A token that may follow a node: how likely, who said so first, and where it stands in the trees."""

    __slots__ = ("chance", "drafter", "places")

    def __init__(self, chance: float, drafter: str, places: list[tuple[int, int]]) -> None:
        self.chance = chance
        self.drafter = drafter
        self.places = places


# a node that may join the tree: (-survival, age, parent, its parent's token, its token, its drafter, its places);
# plain tuples, since a tree of 15 nodes is chosen from some 60 of them
_Branch = tuple[float, int, int, int, int, str, Places]


class _Growth:
    """What may still join the tree, best first. `trees` carry estimates of survival."""

    def __init__(self, trees: Sequence[DraftTree], sprout: Sprout | None) -> None:
        self.branches: list[_Branch] = []
        self._trees = trees
        self._children = [_children(tree) for tree in trees]
        self._sprout = sprout
        self._age = 0

    def open(self, parent: int, previous: int, token_id: int, survival: float, places: Places) -> None:
        """Let what anybody says may follow a node compete; `places` are where it stands in the trees."""
        sprout, branches, age = self._sprout, self.branches, self._age
        claims = self._claims(places) if places else {}
        if sprout is not None:
            drafter = sprout.drafter
            for token, chance in sprout.successors(previous, token_id):
                claim = claims.get(token)
                if claim is not None:
                    claim.chance = max(claim.chance, chance)
                    if claim.drafter in sprout.outranks:
                        claim.drafter = drafter
                elif survival * chance >= LEAST_SURVIVAL:
                    age += 1
                    heappush(branches, (-survival * chance, age, parent, token_id, token, drafter, ()))
        for token, claim in claims.items():
            age += 1
            minus_survival = -survival * claim.chance
            heappush(branches, (minus_survival, age, parent, token_id, token, claim.drafter, claim.places))
        self._age = age

    def _claims(self, places: Places) -> dict[int, _Claim]:
        """What the trees say may follow a node, by token."""
        claims: dict[int, _Claim] = {}
        for index, node in places:
            tree = self._trees[index]
            above = tree.survival[node] if node >= 0 else 1.0
            for child in self._children[index].get(node, ()):
                token = tree.token_ids[child]
                chance = tree.survival[child] / above if above else 0.0
                claim = claims.get(token)
                if claim is None:
                    claims[token] = _Claim(chance, tree.drafters[child], [(index, child)])
                else:
                    claim.chance = max(claim.chance, chance)
                    claim.places.append((index, child))
        return claims


def _children(tree: DraftTree) -> dict[int, list[int]]:
    """Nodes by parent, -1 = the root."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    return children


def merge(trees: Sequence[DraftTree], cap: int, sprout: Sprout | None = None) -> DraftTree:
    """The best tree of at most `cap` nodes that the trees and the sprout make together.

    Args:
        trees: valid ones under the same root, each with estimates of survival.
        cap: at least 1.
        sprout: who guesses further below every node, and beside it.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    drafters: list[str] = []
    survival: list[float] = []
    growth = _Growth(trees, sprout)
    previous, root = (sprout.previous, sprout.root) if sprout is not None else (-1, -1)
    growth.open(-1, previous, root, 1.0, [(index, -1) for index in range(len(trees))])
    while growth.branches and len(token_ids) < cap:
        minus_survival, _, parent, previous, token_id, drafter, places = heappop(growth.branches)
        node = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        drafters.append(drafter)
        survival.append(-minus_survival)
        if node + 1 < cap:
            growth.open(node, previous, token_id, -minus_survival, places)
    return DraftTree(tuple(token_ids), tuple(parents), tuple(drafters), tuple(survival))
