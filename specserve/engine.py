"""The conductor: the only object that changes while requests are served.

A step is plan → propose → build → launch → draw → walk → cut → advance → publish; every stage takes a finished record
and returns one. One thread owns an engine. Trouble of one request ends as one event of that request: a bad tree costs
the tree, a non-finite row or a failed forward costs the requests that were in it, and their pages are free at once.

A runner that computes by itself is given the next step as soon as the last one has advanced (ids, lengths, pages,
grammar), and text and events are made meanwhile: `step` then ends with a step in flight.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specserve import batch, commit
from specserve.answertext import AnswerText, TextSource
from specserve.batch import Span, StepBatch
from specserve.choice import Choice, Times, open_choice
from specserve.commit import Cut
from specserve.config import EngineConfig, ModelLimits
from specserve.controller import Controller, drafter_of
from specserve.drafting import Drafting, verification_of
from specserve.drawing import Drawn, Masks, draw_step
from specserve.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    FieldViolation,
    GrammarStuck,
    InvalidRequest,
    NumericFault,
    Overloaded,
    SpecserveError,
)
from specserve.events import Event, Failed, FinishReason, TokenLogprobs
from specserve.grammar import Grammar, GrammarState
from specserve.grammar.constrain import constrain
from specserve.logprobs import report_draws, report_prompt
from specserve.metrics import EngineMetrics, count_step
from specserve.pages import PagePool, PageTable
from specserve.prefix import PrefixIndex
from specserve.proposal import Drafter, DraftTree, StepResult
from specserve.publish import Committed, publish, started
from specserve.request import Request, Sequence
from specserve.sample import STUCK, top_ids
from specserve.scheduler import Scheduler, StepPlan
from specserve.validation import validate
from specserve.verify import walk

if TYPE_CHECKING:
    from specserve_kernels import Ops

    from specserve.runner import ForwardResult, Launch, Runner


@dataclass(slots=True, eq=False)
class _Active:
    """One request in flight; `choices` are those not finished yet, by sequence."""

    request: Request
    times: Times
    grammar: Grammar | None
    choices: dict[Sequence, Choice] = field(default_factory=dict)
    started: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that began and was launched at these engine times; `wait` waits for its result, if it must."""

    plan: StepPlan
    trees: list[DraftTree]
    batch: StepBatch
    masks: Masks
    wait: Callable[[], ForwardResult]
    began: float
    launched: float


def _as_fault(exc: Exception) -> SpecserveError:
    """An error of ours as it is, anything else as the engine's fault."""
    if isinstance(exc, SpecserveError):
        return exc
    error = EngineFault(f"the step failed: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


class Engine:
    """Serves requests step by step. `events` of a request: Started, Deltas, one Finished per choice; or Failed.

    `launch` starts a forward on a runner that computes by itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        runner: Runner,
        ops: Ops,
        tokenizer: TextSource,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        clock: Callable[[], float] = time.monotonic,
        launch: Launch | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.clock = clock
        self.metrics = EngineMetrics()
        self.pool = PagePool(limits.pool_tokens // limits.page_size, limits.page_size)
        self.index = PrefixIndex(self.pool) if config.cache.enable_prefix_caching else None
        self.controller = controller
        self.drafting = Drafting(drafters, controller, limits.vocab_size, self.metrics, clock)
        self.scheduler = Scheduler(config.scheduler, self.pool, self.index, limits.max_model_len, controller.budgets)
        self._runner = runner
        self._ops = ops
        self._tokenizer = tokenizer
        self._active: dict[str, _Active] = {}
        self._events: list[Event] = []
        self._untold: list[Committed] = []
        self._ahead = launch
        self._flight: _Flight | None = None
        self._arrivals = 0

    # ---- requests in and out

    def submit(self, request: Request, grammar: Grammar | None = None) -> None:
        """Put a request in line; `grammar` is what `request.params.grammar` was compiled to, by the door.

        Raises:
            InvalidRequest: it cannot be served as written, or its id is in flight.
            Overloaded: the line is full; the message has both numbers.
        """
        validate(request, self.limits)
        if request.request_id in self._active or any(e.request_id == request.request_id for e in self._events):
            raise InvalidRequest([FieldViolation("request_id", f"{request.request_id!r} is in flight already")])
        if request.params.bad_words and not request.bad_word_ids:
            raise InvalidRequest([FieldViolation("bad_words", "must come with the token ids that spell them")])
        if (request.params.grammar is None) != (grammar is None):
            raise InvalidRequest([FieldViolation("grammar", "must come compiled, and only if the request has one")])
        self._check_room(request)
        params = request.params
        sequence = Sequence(
            request=request,
            choice=0,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            arrival=self._arrivals,
            token_ids=list(request.prompt_token_ids),
            table=PageTable(self.pool),
            num_siblings=params.n - 1,
        )
        self._arrivals += 1
        arrived_at = self.clock() if request.arrival_time is None else request.arrival_time
        active = _Active(request, Times(submitted_at=arrived_at), grammar)
        if params.prompt_logprobs is not None:
            active.prompt_logprobs = [None]
        self._active[request.request_id] = active
        self._open_choice(active, sequence)
        self.scheduler.add(sequence)

    def _check_room(self, request: Request) -> None:
        config, waiting = self.config.scheduler, self.scheduler.waiting
        if len(waiting) >= config.max_num_queued_requests:
            raise Overloaded(
                f"{len(waiting)} requests are waiting; max_num_queued_requests is {config.max_num_queued_requests}",
                metadata={"limit": str(config.max_num_queued_requests), "got": str(len(waiting))},
            )
        tokens = sum(sequence.num_pending for sequence in waiting) + len(request.prompt_token_ids)
        if waiting and tokens > config.max_num_queued_tokens:
            raise Overloaded(
                f"{tokens} prompt tokens would be waiting; max_num_queued_tokens is {config.max_num_queued_tokens}",
                metadata={"limit": str(config.max_num_queued_tokens), "got": str(tokens)},
            )

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free on return. Unknown ids are ignored."""
        if request_id in self._active:
            cancelled = Cancelled(f"request {request_id!r} was aborted")
            self._fail(self._active[request_id].request, cancelled, FinishReason.ABORT)

    def has_work(self) -> bool:
        return bool(self._active or self._events or self._flight)

    def _open_choice(self, active: _Active, sequence: Sequence) -> None:
        sequence.stats.drafter = drafter_of(sequence, self.config.speculation)
        stops = commit.stop_ids(active.request.params, self.limits.eos_token_ids)
        text = AnswerText(self._tokenizer.incremental(), active.request.params)
        active.choices[sequence] = open_choice(sequence, text, stops, active.times, active.grammar)

    def _fail(self, request: Request, error: Exception, reason: FinishReason = FinishReason.ERROR) -> None:
        self._publish()  # what was committed is told first, which may have been the end of it
        if request.request_id in self._active:
            self._end(request, error, reason)

    def _end(self, request: Request, error: Exception, reason: FinishReason = FinishReason.ERROR) -> None:
        active = self._active.pop(request.request_id, None)
        for sequence in () if active is None else active.choices:
            self._drop(sequence)
        self.metrics.count_finish(reason)
        self._events.append(Failed(request_id=request.request_id, error=_as_fault(error)))

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out of everything that knows it."""
        self.drafting.drop(sequence)
        self.scheduler.remove(sequence)

    def step(self) -> list[Event]:
        """Run one step and return what happened; [] when there is nothing to do.

        With a runner that computes by itself: end the step in flight, launch the next one, return what happened.
        """
        self._land()
        began = self.clock()
        plan = self._plan(began)
        if plan.rows:
            self._launch(plan, began)
        if self._ahead is None:
            self._land()
        self._publish()
        if self.config.debug and not self._active:
            self.pool.check()
        events, self._events = self._events, []
        return events

    def _plan(self, now: float) -> StepPlan:
        """End what is too late, and see who has rows in the next step."""
        for active in list(self._active.values()):
            if active.request.deadline is not None and active.request.deadline <= now:
                phase = "running" if active.started else "waiting for its first token"
                self._fail(active.request, DeadlineExceeded(f"the deadline passed while the request was {phase}"))
        plan = self.scheduler.plan()
        self.metrics.num_preemptions += len(plan.preempted)
        for rows in plan.rows:
            self._active[rows.sequence.request.request_id].times.plan(now)
        return plan

    def _fail_step(self, plan: StepPlan, exc: Exception) -> None:
        for rows in plan.rows:
            self._fail(rows.sequence.request, exc)

    def _launch(self, plan: StepPlan, began: float) -> None:
        """Everything up to the forward."""
        try:
            self._runner.apply(plan.copies, copies=True)
            trees = self.drafting.propose(plan.rows)
            masks = constrain(plan.rows, trees, self._grammar_of, self.limits.vocab_size)
            step = batch.build(plan.rows, trees)
            launched = self.clock()
            wait = self._forward(step) if self._ahead is None else self._ahead(step)
        except Exception as exc:
            return self._fail_step(plan, exc)
        for sequence in plan.admitted:
            self.metrics.num_cached_tokens += sequence.table.cached_len
        self.metrics.num_copied_slots += len(plan.copies)
        self._flight = _Flight(plan, trees, step, masks, wait, began, launched)

    def _forward(self, step: StepBatch) -> Callable[[], ForwardResult]:
        result = self._runner.forward(step)
        return lambda: result

    def _land(self) -> None:
        """Everything from the forward's result on, if a step is in flight."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            self._advance(flight)
            if self._ahead is None:
                self._publish()
            self.drafting.settle(flight.plan.rows, flight.trees, self.clock() - flight.began)
        except Exception as exc:
            self._fail_step(flight.plan, exc)
        self.metrics.step_seconds += self.clock() - flight.began

    def _advance(self, flight: _Flight) -> None:
        """Draw, walk, cut: all that the next plan needs."""
        began, metrics = flight.launched if self._ahead is None else self.clock(), self.metrics
        step, result = flight.batch, flight.wait()
        metrics.num_forwards += 1
        metrics.num_rows += step.num_rows
        metrics.max_rows_in_step = max(metrics.max_rows_in_step, step.num_rows)
        if self._ahead is not None:  # requests may have ended since the launch; nobody sees what their rows came to
            spans = (span for span in step.spans if span.sequence.request.request_id in self._active)
            step = replace(step, spans=tuple(spans))
        drawn = draw_step(step, result, flight.masks, self._choice_of, self._ops, metrics)
        metrics.verify_seconds += self.clock() - began
        if (learner := self.drafting.wants_top_ids()) is not None:
            began = self.clock()
            result = replace(result, top_ids=top_ids(result.logits, self._ops))
            self.drafting.charge(learner, began)
        for span in step.spans:
            active = self._active.get(span.sequence.request.request_id)
            if active is None:  # another choice's trouble ended the request in this very step
                continue
            try:
                self._commit(active, span, result, drawn.get(span.sequence))
            except Exception as exc:
                self._fail(active.request, exc)

    def _publish(self) -> None:
        """Make text and events of what was committed."""
        untold, self._untold = self._untold, []
        failed: set[str] = set()
        for committed in untold:
            request = committed.choice.sequence.request
            try:
                if request.request_id not in failed:
                    self._events += publish(committed)
                    self.metrics.count_finish(committed.kept.reason)
            except Exception as exc:
                failed.add(request.request_id)
                self._end(request, exc)

    def _grammar_of(self, sequence: Sequence) -> GrammarState | None:
        return self._choice_of(sequence).grammar

    def _choice_of(self, sequence: Sequence) -> Choice:
        return self._active[sequence.request.request_id].choices[sequence]

    # ---- committing

    def _commit(self, active: _Active, span: Span, result: ForwardResult, drawn: Drawn | None) -> None:
        """Settle one sequence's rows: check them, keep what was accepted, cut, publish, tell."""
        if active.prompt_logprobs is not None:
            report_prompt(active.prompt_logprobs, span, result.logits)
        pending = result.finite[span.first : span.first + span.num_pending]
        if not all(pending):
            self._fault(active, span)
        elif drawn is not None and drawn.error is not None:
            raise drawn.error
        elif drawn is not None and STUCK in drawn.ids[: span.sequence.num_siblings + 1]:
            excluded = "bans, allowed ids or the grammar exclude every token"
            self._fail(active.request, GrammarStuck(f"{excluded} at position {len(span.sequence.token_ids)}"))
        elif drawn is None:
            self.metrics.num_prompt_tokens += span.num_pending
            self._commit_rows(span.sequence, span.num_pending, ())
            self._publish_pages(span.sequence)
        elif span.sequence.num_siblings:
            self._commit_fork(active, span, result, drawn)
        else:
            self._commit_run(active, span, self._accepted(span, result, drawn), result, drawn)

    def _accepted(self, span: Span, result: ForwardResult, drawn: Drawn) -> tuple[int, ...]:
        """The path, up to the first node that is not finite or stuck: it fails as a root, where plain decoding does."""
        path, _ = walk(span.tree, drawn.ids)
        first = span.first + span.num_pending
        usable = [result.finite[first + node] and drawn.ids[1 + node] != STUCK for node in path]
        return path if all(usable) else path[: usable.index(False)]

    def _fault(self, active: _Active, span: Span) -> None:
        """Non-finite rows: wipe what the sequence wrote, then end its request."""
        table = span.sequence.table
        written = table.pages[(span.sequence.cached_tokens or 0) // self.pool.page_size :]
        if self.index is not None:
            self.index.unpublish([page for page in written if page in self.pool.indexed])
        self._runner.zero([page for page in written if self.pool.holders[page] == 1])
        self._fail(active.request, NumericFault(f"non-finite values in the rows from position {table.cached_len} on"))

    def _commit_rows(self, sequence: Sequence, num_pending: int, path: SequenceOf[int]) -> None:
        """Keep the pending rows and the path, and bring the path together before anybody can read it."""
        moves = sequence.table.commit(num_pending, [num_pending + node for node in path])
        if moves:
            self._runner.apply(moves)
            self.metrics.num_compacted_slots += len(moves)

    def _publish_pages(self, sequence: Sequence) -> None:
        if self.index is not None:
            self.index.publish(sequence.table, sequence.token_ids, sequence.request.cache_salt)

    def _commit_fork(self, active: _Active, span: Span, result: ForwardResult, drawn: Drawn) -> None:
        """The prompt of n choices is done: siblings share its pages, each starts from its own draw."""
        first = span.sequence
        logprobs = report_draws(drawn.draws, drawn.ids, range(first.num_siblings + 1), result.logits)
        self._commit_rows(first, span.num_pending, ())
        self.metrics.num_prompt_tokens += span.num_pending
        choices = [first]
        for choice in range(1, first.num_siblings + 1):
            sibling = Sequence(
                request=first.request,
                choice=choice,
                seed=first.seed,
                arrival=first.arrival,
                token_ids=list(first.token_ids),
                table=first.table.fork(),
                cached_tokens=first.cached_tokens,
            )
            self._open_choice(active, sibling)
            self.scheduler.add_fork(sibling)
            choices.append(sibling)
        first.num_siblings = 0
        for i, (sequence, token_id) in enumerate(zip(choices, drawn.ids, strict=True)):
            told = None if logprobs is None else logprobs[i : i + 1]
            kept = self._cut(sequence, [token_id])
            self._emit(active, Committed(active.choices[sequence], kept, 0, told, self.clock()))

    def _commit_run(
        self, active: _Active, span: Span, path: tuple[int, ...], result: ForwardResult, drawn: Drawn
    ) -> None:
        """The accepted path and the bonus of one sequence, cut where the answer ends."""
        sequence = span.sequence
        is_root = span.num_pending == 1 and sequence.has_token
        rows = [0, *(1 + node for node in path)]
        logprobs = report_draws(drawn.draws, drawn.ids, rows, result.logits)
        kept = self._cut(sequence, [drawn.ids[row] for row in rows])
        path = path[: len(kept.token_ids)]
        self._commit_rows(sequence, span.num_pending, path)
        if is_root:
            depths = span.tree.depths()
            for stats in (sequence.stats, self.metrics.speculation):
                count_step(stats, depths, len(path), len(kept.token_ids))
        else:
            self.metrics.num_prompt_tokens += span.num_pending
        self._emit(active, Committed(active.choices[sequence], kept, len(path), logprobs, self.clock()))
        if is_root and kept.reason is None:
            best = result.top_ids[span.first_logit : span.first_logit + 1 + len(span.tree)]
            self.drafting.observe(sequence, StepResult(span.tree, path, kept.token_ids, drawn.ids, best))

    def _cut(self, sequence: Sequence, run: SequenceOf[int]) -> Cut:
        choice = self._choice_of(sequence)
        return commit.cut(sequence, run, choice.text, choice.stops, self.scheduler.tokens_allowed(sequence))

    def _emit(self, active: _Active, committed: Committed) -> None:
        """Append the kept tokens and publish full pages; what remains is to be told."""
        choice, kept, sequence = committed.choice, committed.kept, committed.choice.sequence
        sequence.token_ids += kept.token_ids
        if choice.grammar is not None:
            choice.grammar.accept(kept.token_ids)
        self._publish_pages(sequence)
        self.metrics.num_output_tokens += len(kept.token_ids)
        if not active.started:
            active.started = True
            rule = verification_of(sequence, self.config.speculation)
            self._events.append(started(choice, self.config.numerics, rule, active.prompt_logprobs))
        self._untold.append(committed)
        if kept.reason is not None:
            self._finish(active, sequence)

    def _finish(self, active: _Active, sequence: Sequence) -> None:
        if not sequence.stats.num_drafts and sequence.stats.inactive_reason is None:
            sequence.stats.inactive_reason = self.controller.inactive_reason(sequence)
        self._drop(sequence)
        del active.choices[sequence]
        if not active.choices:
            del self._active[sequence.request.request_id]
