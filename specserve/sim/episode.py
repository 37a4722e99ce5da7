"""One episode: a script played on a real engine under a virtual clock, with every law recounted after every step.

Pool, index, scheduler, controller, drafters, drawing, verification and commit are the product's own; only the model
is a hash, so that each answer is known before it is asked for. The first law that does not hold ends the episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import specserve_kernels

from specserve import build
from specserve.config import CacheConfig, EngineConfig, ModelLimits, SchedulerConfig, SpeculationConfig
from specserve.controller import Controller
from specserve.engine import Engine
from specserve.errors import InvalidRequest, Overloaded
from specserve.events import Delta, Failed, Finished
from specserve.proposal import Drafter
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.sim.guessers import FaultyDrafter, TreeGuesser
from specserve.sim.hashmodel import HashRunner, Violation, answer
from specserve.sim.laws import Asked, Ledger, require
from specserve.sim.script import DRAFTER_FAULTS, DRAFTERS, EOS, POISON, SOFT, VOCAB_SIZE, Action, Arrival, Fault, World

TICK = 0.01  # seconds of the virtual clock that a step takes


class PlainText:
    """Text of a token is `<id>`; the text layer has tests of its own."""

    def incremental(self) -> PlainText:
        return self

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


def make_engine(world: World, runner: HashRunner, drafters: dict[str, Drafter], clock: Callable[[], float]) -> Engine:
    """The product's engine around the hash model."""
    config = EngineConfig(
        cache=CacheConfig(
            page_size=world.page_size, num_pages=world.num_pages, enable_prefix_caching=world.enable_prefix_caching
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=world.max_num_seqs,
            min_chunk=world.min_chunk,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_num_queued_requests=world.max_num_queued_requests,
        ),
    )
    limits = ModelLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=world.max_model_len,
        pool_tokens=world.num_pages * world.page_size,
        page_size=world.page_size,
        max_num_seqs=world.max_num_seqs,
        eos_token_ids=(EOS,),
        drafters=("off", *DRAFTERS),
    )
    ops = specserve_kernels.load("auto")  # for the noise of sampled draws
    return Engine(config, limits, runner, ops, PlainText(), drafters, Controller(config.speculation), clock)


def plain_answers(world: World, request: Request) -> list[tuple[list[int], str]]:
    """The same request alone on a fresh engine that never drafts: the oracle where noise decides."""
    engine = make_engine(world, HashRunner(world.num_pages, world.page_size), {}, lambda: 0.0)
    engine.submit(
        Request(request_id="plain", prompt_token_ids=request.prompt_token_ids, params=request.params,
                speculation=SpeculationParams(drafter="off"))
    )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in range(request.params.n)]
    reasons = [""] * request.params.n
    steps = 2 + 2 * world.max_model_len * request.params.n
    while engine.has_work():
        steps -= 1
        require(steps > 0, "liveness", f"{request.request_id} alone on an engine does not finish")
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                tokens[event.index] += [token.token_id for token in event.tokens]
            elif isinstance(event, Finished):
                reasons[event.index] = event.reason.value
    return list(zip(tokens, reasons, strict=True))


class Episode:
    """Plays `actions` in `world`. `coverage` counts what happened, so that a run shows what it has tried."""

    def __init__(self, world: World, actions: Sequence[Action]) -> None:
        self.now = 0.0
        self.step = 0
        self.coverage: Counter[str] = Counter()
        self.runner = HashRunner(world.num_pages, world.page_size)
        guessers: list[Drafter] = [
            build.make_drafters(SpeculationConfig(), None)["ngram"],
            TreeGuesser(world.name, world.truth),
        ]
        self._drafters = {drafter.name: FaultyDrafter(drafter) for drafter in guessers}
        self.engine = make_engine(world, self.runner, dict(self._drafters), lambda: self.now)
        self._ledger = Ledger(self.engine, self.runner, self._drafters)
        self._world = world
        self._room = min(world.max_model_len, world.num_pages * world.page_size)
        self._todo = list(actions)
        self._cancels: list[Fault] = []
        self._slow = 0.0

    def play(self) -> None:
        """Run to the end.

        Raises:
            Violation: the first law that did not hold, with the step.
        """
        try:
            self._play()
        except Violation as violation:
            violation.step = self.step
            raise
        except Exception as error:  # the engine may raise nothing but its refusals
            crash = Violation("crash", f"{type(error).__name__}: {error}")
            crash.step = self.step
            raise crash from error

    def _play(self) -> None:
        last_step = None
        while self._todo or self.engine.has_work():
            if self._todo and not self.engine.has_work():
                self.step = max(self.step, self._todo[0].at)
            while self._todo and self._todo[0].at <= self.step:
                self._act(self._todo.pop(0))
            self._cancel_in_phase()
            self._step()
            self.step += 1
            if not self._todo:
                last_step = last_step or self.step + self._steps_to_finish()
                late = f"{list(self._ledger.live)} should have finished by step {last_step}"
                require(self.step <= last_step, "liveness", late)
        self._ledger.check_end()
        self.coverage["preemptions"] += self.engine.metrics.num_preemptions
        self.coverage["cached tokens"] += self.engine.metrics.num_cached_tokens
        self.coverage["compacted slots"] += self.engine.metrics.num_compacted_slots
        self.coverage["copied slots"] += self.engine.metrics.num_copied_slots
        self.coverage["draft tokens"] += self.engine.metrics.speculation.num_draft_tokens
        self.coverage["accepted tokens"] += self.engine.metrics.speculation.num_accepted_tokens
        self.coverage["output tokens"] += self.engine.metrics.num_output_tokens
        self.coverage["drafter faults"] += self.engine.metrics.num_drafter_faults

    def _steps_to_finish(self) -> int:
        """The best-ranked sequence prefills or draws at least one token in every step, and is never preempted.

        So each one is done at the latest when all better ranked ones are and it has recomputed and drawn all.
        """
        return 2 + sum(2 * self._room * asked.request.params.n for asked in self._ledger.live.values())

    def _step(self) -> None:
        before, began, forward_raises = set(self.engine.scheduler.running), self.now, self.runner.raises
        events = self.engine.step()
        self.now += TICK + self._slow
        self._slow = 0.0
        self.runner.forget_free(self.engine.pool)
        if self.runner.breach is not None:
            raise self.runner.breach
        for event in events:
            self._ledger.take(event, began, forward_raises)
            if isinstance(event, Failed):
                self.coverage[f"failed: {type(event.error).__name__}"] += 1
        self._ledger.check(before, began)
        self.runner.struck.clear()

    # ---- what the script does

    def _act(self, action: Action) -> None:
        if isinstance(action, Arrival):
            self._submit(action)
        elif action.kind == "cancel":
            self._cancels.append(action)
        elif action.kind == "not finite":
            self.runner.strikes[f"r{action.number}"] = action.row
        elif action.kind == "forward raises":
            self.runner.raises = True
        elif action.kind == "slow":
            self._slow = action.seconds
        elif action.kind == "duplicate":
            self._submit_again(f"r{action.number}")
        elif action.kind in DRAFTER_FAULTS:
            self._drafters[action.drafter].fault = action.kind
        else:
            raise ValueError(f"the script has a fault of an unknown kind: {action.kind!r}")

    def _submit(self, arrival: Arrival) -> None:
        request = self._request(arrival)
        fits = len(arrival.prompt) + (arrival.max_tokens or 1) <= self._room
        try:
            self.engine.submit(request)
        except InvalidRequest as error:
            require(not fits, "refusals", f"{request.request_id} fits and was refused: {error}")
            self.coverage["refused: too long"] += 1
            return
        except Overloaded:
            waiting, limit = len(self.engine.scheduler.waiting), self._world.max_num_queued_requests
            require(waiting >= limit, "refusals", f"refused with {waiting} of {limit} waiting")
            self.coverage["refused: overloaded"] += 1
            return
        require(fits, "refusals", f"{request.request_id} cannot fit and was accepted")
        n, room = arrival.n, self._room - len(arrival.prompt)
        expected: list[tuple[list[int], str]]
        if POISON in arrival.prompt:
            expected = [([], "")] * n
        elif arrival.temperature == SOFT:
            expected = plain_answers(self._world, request)
        else:
            expected = [answer(request, choice, room) for choice in range(n)]
        self._ledger.accept(Asked(request, expected, [0] * n, [0] * n))
        self.coverage["requests"] += 1

    def _request(self, arrival: Arrival) -> Request:
        return Request(
            request_id=f"r{arrival.number}",
            prompt_token_ids=arrival.prompt,
            params=SamplingParams(
                n=arrival.n,
                temperature=arrival.temperature,
                seed=arrival.seed,
                max_tokens=arrival.max_tokens,
                min_tokens=arrival.min_tokens,
                stop_token_ids=() if arrival.stop_id is None else (arrival.stop_id,),
                stop=() if arrival.stop_text is None else (f"<{arrival.stop_text}>",),
            ),
            speculation=SpeculationParams(drafter=arrival.drafter, num_draft_tokens=arrival.nodes),
            priority=arrival.priority,
            deadline=None if arrival.patience is None else self.now + arrival.patience,
            cache_salt=arrival.salt,
        )

    def _submit_again(self, request_id: str) -> None:
        asked = self._ledger.asked.get(request_id)
        if asked is None or asked.over:
            return
        try:
            self.engine.submit(asked.request)
        except InvalidRequest:
            self.coverage["refused: duplicate"] += 1
        else:
            raise Violation("refusals", f"{request_id} is in flight and was accepted again")

    def _cancel_in_phase(self) -> None:
        for fault in self._cancels.copy():
            request_id = f"r{fault.number}"
            if request_id in self._ledger.asked and self._phase(request_id) == fault.phase:
                self._cancels.remove(fault)
                self.engine.abort(request_id)
                self._ledger.asked[request_id].cancelled = True
                self.coverage[f"cancelled: {fault.phase}"] += 1
                left = [s.sequence_id for s in self._ledger.lines() if s.request.request_id == request_id]
                require(not left, "cancel", f"{left} live on after their cancel")

    def _phase(self, request_id: str) -> str:
        """Of the request's first living choice."""
        if self._ledger.asked[request_id].over:
            return "ended"
        for sequence in self.engine.scheduler.waiting:
            if sequence.request.request_id == request_id:
                return "preempted" if sequence.num_preemptions else "queued"
        for sequence in self.engine.scheduler.running:
            if sequence.request.request_id == request_id:
                return "decoding" if sequence.has_token else "prefill"
        return "failing"
