"""Grammars over one step: forced tokens join the trees as drafts, and every row that draws gets its mask."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from specserve.constraint import with_forced
from specserve.grammar.state import GrammarState, allowed_ids
from specserve.proposal import EMPTY_TREE, DraftTree
from specserve.request import Sequence
from specserve.scheduler import PlannedRows


def constrain(
    plans: SequenceOf[PlannedRows],
    trees: list[DraftTree],
    state_of: Callable[[Sequence], GrammarState | None],
    vocab_size: int,
) -> dict[Sequence, NDArray[np.bool_]]:
    """What grammars allow at each row that draws, [1 + nodes, vocab]; `trees` are changed in place.

    Forced tokens are laid over a tree within the cap of its plan, and what the grammar excludes is taken out.
    """
    masks = {}
    for i, plan in enumerate(plans):
        state = state_of(plan.sequence)
        if state is None or not plan.draws:
            continue
        try:
            tree = with_forced(trees[i], state.forced(plan.node_cap), plan.node_cap)
            trees[i], packed = state.fit(tree.prune(plan.node_cap, plan.max_depth))
            masks[plan.sequence] = allowed_ids(packed, vocab_size)
        except Exception:  # stuck or worn out: nothing can be drawn from a row that allows nothing
            trees[i], masks[plan.sequence] = EMPTY_TREE, np.zeros((1, vocab_size), np.bool_)
    return masks
