"""How often guesses of each kind came true: the counts from which drafters estimate survival.

A kind is whatever a drafter can tell its guesses apart by (the length of a match, the rank among successors). Only
counts are kept, so a record may be shared by all sequences of an engine: it holds nobody's text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from specserve.proposal import DraftTree, StepResult


class Record:
    """Hits and trials per kind, shrunk to a prior; old counts fade by halving once a kind has `memory` trials."""

    def __init__(self, weight: float = 8.0, memory: float = 2048.0) -> None:
        self._weight = weight
        self._memory = memory
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, kind: Hashable, prior: float) -> float:
        """Chance that a guess of this kind comes true; `prior` counts as `weight` trials."""
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        return (hits + prior * self._weight) / (trials + self._weight)

    def count(self, kind: Hashable, hit: bool) -> None:
        hits, trials = self._counts.get(kind, (0.0, 0.0))
        if trials >= self._memory:
            hits, trials = hits / 2, trials / 2
        self._counts[kind] = (hits + hit, trials + 1)


def outcomes(result: StepResult) -> Iterator[tuple[int, bool]]:
    """(node, whether the target drew its token at its parent), of every node whose parent's row drew a token.

    A parent off the accepted path counts as well: the target said what it would have drawn after it.
    """
    for node, (parent, token_id) in enumerate(zip(result.tree.parents, result.tree.token_ids, strict=True)):
        drawn = result.drawn[1 + parent]
        if drawn >= 0:
            yield node, drawn == token_id


def committed(tree: DraftTree, tokens: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """(node, whether it carries the token that was committed at its depth), of every node below committed ones only.

    `tokens` follow the root. It need not be the tree that was verified: a proposal is judged as it was made, whatever
    was pruned or merged since.
    """
    depths = {-1: 0}
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        depth = depths.get(parent)
        if depth is not None and depth < len(tokens):
            hit = token_id == tokens[depth]
            if hit:
                depths[node] = depth + 1
            yield node, hit
