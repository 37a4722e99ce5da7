"""All loaded drafters together: their guesses become one tree.

A tree of 16 rows costs what a chain of five does, and drafters that fail in different places fill it well (merge.py).
Recycling proposes no tree of its own here: it grows on beside and below those of the others. Every part learns from
the outcome of the merged tree. A part that fails for a sequence is not asked about it again, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve_drafts.merge import Sprout, merge
from specserve_drafts.recycling import RecyclingDrafter


class AutoDrafter:
    """Merges what `parts` propose; where two guess the same, the node is the earlier part's.

    Parts judge their guesses by the tokens that were committed or by paths, since the tree that was verified is not
    theirs. `num_faults` counts what was lost: trees, and what parts failed to start or to learn.
    """

    name = "auto"

    def __init__(self, parts: Sequence[Drafter], vocab_size: int) -> None:
        self.parts = tuple(parts)
        self.wants_top_ids = any(part.wants_top_ids for part in parts)
        self.num_faults = 0
        self._vocab_size = vocab_size
        self._muted: set[tuple[str, str]] = set()  # (part, sequence)

    def start(self, view: DraftRow) -> None:
        for part in self.parts:
            self._try(part, view, partial(part.start, view))

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees: list[list[DraftTree]] = [[] for _ in rows]
        sprouts: list[Sprout | None] = [None] * len(rows)
        for part in self.parts:
            asked = [i for i, row in enumerate(rows) if (part.name, row.sequence_id) not in self._muted]
            if isinstance(part, RecyclingDrafter):
                for i, sprout in self._sprouts(part, rows, asked):
                    sprouts[i] = sprout
            else:
                for i, tree in self._ask(part, rows, caps, asked):
                    trees[i].append(tree)
        return [merge(*each) for each in zip(trees, caps, sprouts, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        for part in self.parts:
            if (part.name, view.sequence_id) not in self._muted:
                self._try(part, view, partial(part.observe, view, result))

    def stop(self, view: DraftRow) -> None:
        for part in self.parts:
            self._try(part, view, partial(part.stop, view))
            self._muted.discard((part.name, view.sequence_id))

    def _try(self, part: Drafter, view: DraftRow, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._mute(part, view)

    def _mute(self, part: Drafter, row: DraftRow) -> None:
        self.num_faults += 1
        self._muted.add((part.name, row.sequence_id))

    def _ask(
        self, part: Drafter, rows: Sequence[DraftRow], caps: Sequence[int], asked: Sequence[int]
    ) -> list[tuple[int, DraftTree]]:
        """The part's usable trees, by row; if it raises, each row is asked alone, and the culprits are muted."""
        if not asked:
            return []
        try:
            trees = part.propose([rows[i] for i in asked], [caps[i] for i in asked])
            if len(trees) != len(asked):
                raise ValueError(f"{len(asked)} rows were given, {len(trees)} trees came back")
        except Exception:
            if len(asked) > 1:
                return [found for i in asked for found in self._ask(part, rows, caps, [i])]
            self._mute(part, rows[asked[0]])
            return []
        return [(i, tree) for i, tree in zip(asked, trees, strict=True) if self._usable(tree)]

    def _usable(self, tree: DraftTree) -> bool:
        """Whether it has nodes that can be verified and compared with others."""
        try:
            if not len(tree):
                return False
            usable = tree.fault(self._vocab_size) is None and len(tree.survival) > 0
        except Exception:
            usable = False
        self.num_faults += not usable
        return usable

    def _sprouts(
        self, recycling: RecyclingDrafter, rows: Sequence[DraftRow], asked: Sequence[int]
    ) -> list[tuple[int, Sprout]]:
        try:
            recycling.read_prompts([rows[i] for i in asked])
            return [(i, recycling.sprout(rows[i])) for i in asked]
        except Exception:
            self.num_faults += 1
            return []
