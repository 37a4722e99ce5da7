"""All loaded drafters together: their guesses become one tree.

A tree of 16 rows costs what a chain of five does, and drafters that fail in different places fill it well (merge.py).
Recycling proposes no tree of its own here: it grows on beside and below those of the others. Every part learns from
the outcome of the merged tree. A part that fails for a sequence is not asked about it again, and the others go on.
A part with forwards of its own is asked only as long as what it brings is worth its time (payback.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from specserve.config import SAMPLING_DRAFTERS
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve_drafts.merge import Sprout, merge
from specserve_drafts.payback import Asked, Payback
from specserve_drafts.recycling import RecyclingDrafter


@dataclass(slots=True)
class _Step:
    """From one `propose` to the next. `lengths`: of each sequence, at its beginning; the rest is by costly part.

    `is_first`: a sequence was not asked about in the step before. Parts take in its prompt then, which tells nothing of
    the steps to come.
    """

    lengths: dict[str, int]
    began: float
    is_first: bool = False
    own_seconds: dict[str, float] = field(default_factory=dict)  # of those that are asked
    own_tokens: dict[str, int] = field(default_factory=dict)

    def charge(self, name: str, seconds: float) -> None:
        if name in self.own_seconds:
            self.own_seconds[name] += seconds

    def credit(self, drafters: Sequence[str]) -> None:
        """Accepted nodes, by whose they were."""
        for name in self.own_seconds:
            self.own_tokens[name] = self.own_tokens.get(name, 0) + drafters.count(name)


class AutoDrafter:
    """Merges what `parts` propose; where two guess the same, the node is the earlier part's.

    Parts judge their guesses by the tokens that were committed or by paths, since the tree that was verified is not
    theirs. `num_faults` counts what was lost: trees, and what parts failed to start or to learn.
    """

    name = "auto"

    def __init__(self, parts: Sequence[Drafter], vocab_size: int, clock: Callable[[], float] = monotonic) -> None:
        self.parts = tuple(parts)
        self.wants_top_ids = any(part.wants_top_ids for part in parts)
        self.num_faults = 0
        self.paybacks = {part.name: Payback() for part in parts if part.name in SAMPLING_DRAFTERS}
        self._vocab_size = vocab_size
        self._clock = clock
        self._muted: set[tuple[str, str]] = set()  # (part, sequence)
        self._step = _Step({}, 0.0)

    def start(self, view: DraftRow) -> None:
        for part in self.parts:
            self._try(part, view, partial(part.start, view))

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self._begin_step(rows)
        trees: list[list[DraftTree]] = [[] for _ in rows]
        sprouts: list[Sprout | None] = [None] * len(rows)
        for part in self.parts:
            if part.name in self.paybacks and part.name not in self._step.own_seconds:
                continue
            asked = [i for i, row in enumerate(rows) if (part.name, row.sequence_id) not in self._muted]
            if isinstance(part, RecyclingDrafter):
                for i, sprout in self._sprouts(part, rows, asked):
                    sprouts[i] = sprout
            else:
                began = self._clock()
                for i, tree in self._ask(part, rows, caps, asked):
                    trees[i].append(tree)
                self._step.charge(part.name, self._clock() - began)
        return [merge(*each) for each in zip(trees, caps, sprouts, strict=True)]

    def _begin_step(self, rows: Sequence[DraftRow]) -> None:
        """Judge the costly parts by the step that ends now, and choose whom to ask in the one that begins."""
        if not self.paybacks:
            return
        ended, begins = self._step, _Step({row.sequence_id: len(row.token_ids) for row in rows}, self._clock())
        begins.is_first = not begins.lengths.keys() <= ended.lengths.keys()
        if ended.lengths.keys() == begins.lengths.keys() and not ended.is_first:
            tokens = sum(begins.lengths.values()) - sum(ended.lengths.values())
            for name, own_seconds in ended.own_seconds.items():
                self.paybacks[name].count(
                    Asked(tokens, begins.began - ended.began, ended.own_tokens.get(name, 0), own_seconds)
                )
        begins.own_seconds |= {name: 0.0 for name, payback in self.paybacks.items() if payback.asks()}
        self._step = begins

    def observe(self, view: DraftRow, result: StepResult) -> None:
        for part in self.parts:
            if (part.name, view.sequence_id) not in self._muted:
                began = self._clock()
                self._try(part, view, partial(part.observe, view, result))
                self._step.charge(part.name, self._clock() - began)
        self._step.credit([result.tree.drafters[node] for node in result.path])

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
            return [(i, recycling.sprout(rows[i])._replace(outranks=tuple(self.paybacks))) for i in asked]
        except Exception:
            self.num_faults += 1
            return []
