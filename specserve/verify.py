"""Verification: how many of the drafted tokens are already known to be right.

*Coupled* (the default): the target has drawn one token per row with noise keyed by (seed, choice, draw index), and the
walk follows the draft as far as it agrees. It decides how many tokens a step yields, never which: point-mass rule of
speculation (Leviathan et al. 2023; Chen et al. 2023) with shared noise.
Block verification, which keeps the law of an answer but not its tokens, is in specserve/block.py.
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
    path: list[int] = []
    at = -1
    # parents precede their nodes and siblings differ, so one pass in node order finds every step down
    for node, (parent, token_id) in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        if parent == at and token_id == drawn[1 + at]:
            path.append(node)
            at = node
    return tuple(path), drawn[1 + at]
