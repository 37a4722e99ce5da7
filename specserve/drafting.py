"""Asking drafters for trees, and keeping their trouble away from requests.

A drafter that raises, or hands out what cannot be verified, loses that draft and nothing else: the sequence goes on
with an empty tree, and its statistics say why. Sequences are shown to a drafter from their first `propose` on, which
comes in a step after their first token left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from specserve.controller import Controller
from specserve.metrics import EngineMetrics
from specserve.proposal import EMPTY_TREE, Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Sequence
from specserve.scheduler import PlannedRows


def view_of(sequence: Sequence) -> DraftRow:
    """The sequence as its drafter sees it."""
    request = sequence.request
    return DraftRow(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids,
        prompt_len=sequence.prompt_len,
        cached_len=sequence.table.cached_len,
        seed=sequence.seed,
        choice=sequence.choice,
        temperature=request.params.temperature,
        salt=request.cache_salt,
        pages=sequence.table.pages,
        prediction=request.speculation.prediction,
        epoch=sequence.num_preemptions,
    )


class Drafting:
    """The drafters of an engine by name, and which sequences they know. `seconds`: what the last `propose` took."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        vocab_size: int,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.drafters = dict(drafters)
        self.seconds = 0.0
        self._controller = controller
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._clock = clock
        self._known: set[Sequence] = set()
        self._muted: set[Sequence] = set()

    def propose(self, plans: SequenceOf[PlannedRows]) -> list[DraftTree]:
        """One valid tree per plan, within its cap and depth; many are empty."""
        began = self._clock()
        trees = [EMPTY_TREE] * len(plans)
        by_drafter: dict[str, list[int]] = {}
        for i, plan in enumerate(plans):
            if plan.node_cap:
                by_drafter.setdefault(plan.sequence.stats.drafter, []).append(i)
        for name, group in by_drafter.items():
            for i, tree in self._ask(self.drafters[name], plans, group):
                trees[i] = tree
        if by_drafter:
            trees = self._controller.trim(plans, trees)
        self.seconds = self._clock() - began
        self._metrics.draft_seconds += self.seconds
        return trees

    def _ask(
        self, drafter: Drafter, plans: SequenceOf[PlannedRows], group: SequenceOf[int]
    ) -> list[tuple[int, DraftTree]]:
        asked = [i for i in group if self._starts(drafter, plans[i].sequence)]
        if not asked:
            return []
        views, caps = [view_of(plans[i].sequence) for i in asked], [plans[i].node_cap for i in asked]
        try:
            proposed = drafter.propose(views, caps)
            if len(proposed) != len(asked):
                raise ValueError(f"{len(asked)} rows were given, {len(proposed)} trees came back")
        except Exception as exc:
            self._lose([plans[i].sequence for i in asked], f"raised {type(exc).__name__}: {exc}")
            return []
        return [(i, self._checked(plans[i], tree)) for i, tree in zip(asked, proposed, strict=True)]

    def _starts(self, drafter: Drafter, sequence: Sequence) -> bool:
        """Whether the drafter knows the sequence; one that it could not take up is not offered again."""
        sequence.num_asked += 1
        if sequence not in self._known and sequence not in self._muted:
            try:
                drafter.start(view_of(sequence))
                self._known.add(sequence)
            except Exception as exc:
                self._muted.add(sequence)
                self._lose([sequence], f"raised {type(exc).__name__} at the start: {exc}")
        return sequence in self._known

    def _checked(self, plan: PlannedRows, tree: DraftTree) -> DraftTree:
        try:
            fault = tree.fault(self._vocab_size)
        except Exception as exc:
            fault = f"cannot be read: {type(exc).__name__}: {exc}"
        if fault is None:
            return tree.prune(plan.node_cap, plan.max_depth)
        self._lose([plan.sequence], f"proposed a tree that {fault}")
        return EMPTY_TREE

    def _lose(self, sequences: list[Sequence], why: str) -> None:
        self._metrics.num_drafter_faults += 1
        for sequence in sequences:
            sequence.stats.inactive_reason = f"drafter {sequence.stats.drafter!r} {why}"

    def wants_top_ids(self, sequences: Iterable[Sequence]) -> bool:
        """Whether a drafter of one of these sequences learns from the target's best ids."""
        return any(s in self._known and self.drafters[s.stats.drafter].wants_top_ids for s in sequences)

    def observe(self, sequence: Sequence, step: StepResult) -> None:
        """Tell the controller and the drafter what the target made of a step with a root row."""
        self._controller.learn(sequence, step)
        if sequence not in self._known:
            return
        try:
            self.drafters[sequence.stats.drafter].observe(view_of(sequence), step)
        except Exception as exc:
            self._lose([sequence], f"raised {type(exc).__name__} when told the outcome: {exc}")

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended: nobody keeps anything of it."""
        self._controller.forget(sequence)
        self._muted.discard(sequence)
        if sequence in self._known:
            self._known.remove(sequence)
            try:
                self.drafters[sequence.stats.drafter].stop(view_of(sequence))
            except Exception:
                self._metrics.num_drafter_faults += 1
