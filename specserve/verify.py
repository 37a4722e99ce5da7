"""Coupled verification: the target has drawn one token per row; follow the draft as far as it agrees.

The token at a position is drawn by the target alone (DESIGN 2), with noise keyed by (seed, choice, draw index). So
the walk only decides how many of the drawn tokens are already known to be right, never which they are.
Point-mass rule of speculation.md B3 with shared noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.proposal import DraftTree


def walk(tree: DraftTree, drawn: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The accepted path and the bonus token.

    Args:
        tree: the draft under the root.
        drawn: token drawn at the root's row, then at each node's row, [1 + nodes].

    Returns:
        (node indices from the root down, the first drawn token that no child carries).
    """
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    path: list[int] = []
    node = -1
    while (child := children.get((node, drawn[1 + node]))) is not None:
        path.append(child)
        node = child
    return tuple(path), drawn[1 + node]
