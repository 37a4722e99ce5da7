"""Asking drafters for trees, keeping their trouble away from requests, and keeping account of their time.

A drafter that raises, or hands out what cannot be verified, loses that draft and nothing else: the sequence goes on
with an empty tree, and its statistics say why. Sequences are shown to a drafter from their first `propose` on, which
comes in a step after their first token left. In a step for which it is not asked about a sequence it hears nothing of
it, so that where the controller wants no draft a drafter costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import mul

from specserve.config import SAMPLING_DRAFTERS, SpeculationConfig
from specserve.controller import Controller, drafter_of
from specserve.costs import Drafted, StepLoad
from specserve.metrics import EngineMetrics
from specserve.proposal import EMPTY_TREE, Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Sequence
from specserve.scheduler import PlannedRows
from specserve.trace import StepTrace, Trace
from specserve.waits import Wait


def verification_of(sequence: Sequence, config: SpeculationConfig) -> str:
    """How a sequence's drafts are verified: "block" where that is asked for and its drafts are sampled chains.

    Not at T = 0, where it is the same, and not under a grammar, which forces and prunes by the ids that were drafted.
    """
    if config.verification == "coupled":
        return "coupled"
    params = sequence.request.params
    sampled = not params.greedy and params.grammar is None and drafter_of(sequence, config) in SAMPLING_DRAFTERS
    return config.verification if sampled else "coupled"


FEW_CALLS = 2  # in which a drafter takes in a prompt


def view_of(sequence: Sequence, samples: bool = False) -> DraftRow:
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
        samples=samples,
    )


class Drafting:
    """The drafters of an engine by name, and which sequences they know.

    `seconds`: what drafting has taken in this step so far.
    """

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
        self._spent: dict[str, float] = {}  # seconds of each drafter that was asked in this step
        self._drafted: dict[str, Drafted] = {}
        self.trace = Trace()
        self._controller = controller
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._clock = clock
        self._known: set[Sequence] = set()
        self._muted: set[Sequence] = set()
        self._asked: set[Sequence] = set()  # in this step
        self._contexts: list[int] = []  # cached tokens of each plan's sequence, before this step
        self._num_proposed = 0
        self._num_accepted = 0  # before this step

    def propose(self, plans: SequenceOf[PlannedRows]) -> list[DraftTree]:
        """One valid tree per plan, within its cap and depth; many are empty."""
        began = self._clock()
        trees = [EMPTY_TREE] * len(plans)
        self.seconds, self._spent, self._drafted = 0.0, {}, {}
        self._asked.clear()
        self._contexts = [plan.sequence.table.cached_len for plan in plans]
        self._num_accepted = self._metrics.speculation.num_accepted_tokens
        by_drafter: dict[str, list[int]] = {}
        for i, plan in enumerate(plans):
            if plan.node_cap:
                by_drafter.setdefault(plan.sequence.stats.drafter, []).append(i)
                self._asked.add(plan.sequence)
        for name, group in by_drafter.items():
            num_new = sum(plans[i].sequence.num_asked < FEW_CALLS for i in group)
            self._spent[name] = 0.0
            for i, tree in self._ask(self.drafters[name], plans, group):
                trees[i] = tree
            self._drafted[name] = Drafted(len(group), sum(len(trees[i]) for i in group), num_new, 0.0)
            began = self.charge(name, began)
        self._num_proposed = sum(map(len, trees))
        if by_drafter:
            trees = self._controller.trim(plans, trees)
            self.charge(name, began)
        return trees

    def charge(self, name: str, began: float) -> float:
        """Put the time since `began` to a drafter's account; returns the time."""
        now = self._clock()
        self._spent[name] += now - began
        self.seconds += now - began
        return now

    def _ask(
        self, drafter: Drafter, plans: SequenceOf[PlannedRows], group: SequenceOf[int]
    ) -> list[tuple[int, DraftTree]]:
        asked = [i for i in group if self._starts(drafter, plans[i].sequence)]
        if not asked:
            return []
        views, caps = [self._view_of(plans[i].sequence) for i in asked], [plans[i].node_cap for i in asked]
        try:
            proposed = drafter.propose(views, caps)
            if len(proposed) != len(asked):
                raise ValueError(f"{len(asked)} rows were given, {len(proposed)} trees came back")
        except Exception as exc:
            self._lose([plans[i].sequence for i in asked], f"raised {type(exc).__name__}: {exc}")
            return []
        return [(i, self._checked(plans[i], tree)) for i, tree in zip(asked, proposed, strict=True)]

    def _view_of(self, sequence: Sequence) -> DraftRow:
        return view_of(sequence, samples=verification_of(sequence, self._controller.config) == "block")

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

    def wants_top_ids(self) -> str | None:
        """A drafter that was asked in this step and learns from the target's best ids, if there is one."""
        wanting = (name for name in self._spent if self.drafters[name].wants_top_ids)
        return next(wanting, None)

    def observe(self, sequence: Sequence, step: StepResult) -> None:
        """Tell the controller and the drafter what the target made of a draft that they were asked for."""
        if sequence not in self._asked:
            return
        name, began = sequence.stats.drafter, self._clock()
        self._controller.learn(sequence, step)
        if sequence in self._known:
            try:
                self.drafters[name].observe(view_of(sequence), step)
            except Exception as exc:
                self._lose([sequence], f"raised {type(exc).__name__} when told the outcome: {exc}")
        self.charge(name, began)

    def settle(self, plans: SequenceOf[PlannedRows], trees: SequenceOf[DraftTree], seconds: float) -> None:
        """The step is over and took so long altogether: tell the controller, and keep a trace of it."""
        roots = [i for i, plan in enumerate(plans) if plan.draws and plan.num_pending == 1]
        nodes = [len(tree) for tree in trees]
        load = StepLoad(
            num_sequences=len(roots),
            num_nodes=sum(nodes),
            num_prompt_rows=sum(plan.num_pending for plan in plans) - len(roots),
            num_accepted=self._metrics.speculation.num_accepted_tokens - self._num_accepted,
            context=sum(self._contexts[i] for i in roots),
            node_context=sum(map(mul, nodes, self._contexts)),
            num_sampled=sum(1 + nodes[i] for i in roots if not plans[i].sequence.request.params.greedy),
        )
        seconds -= self.seconds
        self._metrics.draft_seconds += self.seconds
        if self.wants_top_ids() is not None:
            self._metrics.count_waits([Wait.TOP_IDS])
        spent = {name: drafted._replace(seconds=self._spent[name]) for name, drafted in self._drafted.items()}
        predicted = self._controller.measured(load, seconds, spent)
        self.trace.add(
            StepTrace(
                num_sequences=load.num_sequences,
                num_prompt_rows=load.num_prompt_rows,
                context=load.context,
                caps=tuple(plans[i].node_cap for i in roots),
                num_proposed=self._num_proposed,
                num_nodes=load.num_nodes,
                num_accepted=load.num_accepted,
                predicted_seconds=predicted,
                seconds=seconds,
                draft_seconds=self.seconds,
                scale=self._controller.scale,
            )
        )

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
