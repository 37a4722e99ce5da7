"""A stateful property test: pool, prefix index, scheduler and engine under arrivals, cancels, deadlines, forks, faults.

The target is a hash (tests/hashlm.py), so that every answer is known beforehand whatever was preempted, shared,
copied or compacted on the way. After every rule the conservation laws are recounted; at the end everything that was
admitted must finish within a computable number of steps and leave the pool whole.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hashlm import HashRunner, HashTreeDrafter, continuation
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from specserve_kernels import load

from specserve.config import CacheConfig, EngineConfig, ModelLimits, SchedulerConfig
from specserve.controller import Controller
from specserve.engine import Engine
from specserve.errors import Cancelled, DeadlineExceeded, EngineFault, InvalidRequest, NumericFault
from specserve.events import Delta, Event, Failed, Finished, Started
from specserve.prefix import page_key, root_key
from specserve.request import Request, SamplingParams, SpeculationParams

VOCAB = 24
EOS = 0
POISON = 23  # a prompt with this token makes its rows non-finite


class Plain:
    """Text of a token is `<id>`; the text layer has tests of its own."""

    def incremental(self) -> Plain:
        return Plain()

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(3, 20),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(2, 6),
        chunk=st.integers(1, 4),
        prefix=st.booleans(),
        seed=st.integers(0, 1000),
        truth=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        ahead=st.booleans(),
    )
    def build(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        chunk: int,
        prefix: bool,
        seed: int,
        truth: float,
        ahead: bool,
    ) -> None:
        self.now = 0.0
        self.failed = False
        config = EngineConfig(
            cache=CacheConfig(page_size=page_size, num_pages=num_pages, enable_prefix_caching=prefix),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, min_chunk=chunk, max_num_batched_tokens=max_num_seqs + chunk + 2
            ),
        )
        limits = ModelLimits(
            vocab_size=VOCAB,
            max_model_len=40,
            pool_tokens=num_pages * page_size,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            eos_token_ids=(EOS,),
            drafters=("off", "hashtree"),
        )
        self.runner = HashRunner(num_pages, page_size, VOCAB)
        self.runner.fault_on = {POISON}
        self.drafter = HashTreeDrafter(seed, VOCAB, truth)
        controller = Controller(config.speculation)
        drafters = {"hashtree": self.drafter}
        launch = self.runner.launch if ahead else None
        self.engine = Engine(
            config, limits, self.runner, load("torch"), Plain(), drafters, controller, lambda: self.now, launch
        )
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, dict[int, list[int]]] = {}
        self.done: dict[str, set[int] | Exception] = {}
        self.first_order: list[Request] = []

    # ---- rules

    @rule(
        start=st.integers(1, 3),
        length=st.integers(1, 14),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 1),
        drafter=st.sampled_from(["off", "hashtree"]),
        nodes=st.integers(0, 9),
        deadline=st.one_of(st.none(), st.integers(0, 30)),
        poisoned=st.sampled_from([False] * 9 + [True]),
        salt=st.sampled_from(["", "", "other"]),
    )
    def arrive(
        self,
        start: int,
        length: int,
        max_tokens: int | None,
        n: int,
        priority: int,
        drafter: str,
        nodes: int,
        deadline: int | None,
        poisoned: bool,
        salt: str,
    ) -> None:
        prompt = [start + i % 3 for i in range(length)]
        if poisoned:
            prompt[-1] = POISON
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n),
            speculation=SpeculationParams(drafter=drafter, num_draft_tokens=nodes),
            priority=priority,
            deadline=None if deadline is None else self.now + deadline,
            cache_salt=salt,
        )
        limits = self.engine.limits
        fits = len(prompt) + (max_tokens or 1) <= min(limits.max_model_len, limits.pool_tokens)
        try:
            self.engine.submit(request)
        except InvalidRequest:
            assert not fits or n > limits.max_num_seqs
            return
        assert fits and n <= limits.max_num_seqs
        self.requests[request.request_id] = request
        self.answers[request.request_id] = {i: [] for i in range(n)}

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.abort(request_id)
        assert all(s.request.request_id != request_id for s in self._sequences())

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @rule(delta=st.integers(1, 10))
    def wait(self, delta: int) -> None:
        self.now += delta

    @rule()
    @precondition(lambda self: self.engine.has_work())
    def forward_fails(self) -> None:
        self.runner.raise_next = RuntimeError("planted")
        self._step()
        self.runner.raise_next = None

    # ---- what must always hold

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.pool.check()
        assert self.engine.metrics.num_drafter_faults == 0
        if self.engine.index is not None:
            self.engine.index.check()
            self._published_pages_hold_their_keys()
        live = {s.sequence_id for s in self._sequences()}
        assert self.drafter.live <= live
        assert {t for t in self.engine.pool.tables if t.pages} <= {s.table for s in self._sequences()}
        seats = sum(1 + s.num_siblings for s in self.engine.scheduler.running)
        assert seats <= self.engine.config.scheduler.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "engine") or self.failed:
            return
        bound = self._step_bound()
        steps = 0
        while self.engine.has_work():
            assert steps <= bound, f"not finished after {bound} steps"
            self._step()
            steps += 1
        pool = self.engine.pool
        pool.check()
        assert pool.num_referenced == 0 and not self.drafter.live
        for request_id, request in self.requests.items():
            outcome = self.done[request_id]
            assert isinstance(outcome, Exception) or outcome == set(range(request.params.n))

    # ---- the machine's own parts

    def _sequences(self) -> list:
        return [*self.engine.scheduler.waiting, *self.engine.scheduler.running]

    def _step_bound(self) -> int:
        """The best-ranked sequence prefills at least one token or draws one in every step, and cannot be preempted.

        So a sequence is done at the latest when all better ranked ones are and it has then recomputed and drawn all.
        """
        limits = self.engine.limits
        longest = min(limits.max_model_len, limits.pool_tokens)
        return 3 + sum(2 * longest * request.params.n for request in self.requests.values())

    def _step(self) -> None:
        self.failed = True  # a failure here must not be hidden by what teardown would find after it
        self._take(self.engine.step())
        self.failed = False

    def _take(self, events: list[Event]) -> None:
        self.runner.poison_free(self.engine)
        for event in events:
            assert not isinstance(self.done.get(event.request_id), Exception), "an event after Failed"
            match event:
                case Started():
                    self._started_in_order(self.requests[event.request_id])
                case Delta():
                    self.answers[event.request_id][event.index] += [token.token_id for token in event.tokens]
                case Finished():
                    self._finished(event)
                case Failed():
                    self._failed(event)

    def _finished(self, event: Finished) -> None:
        request = self.requests[event.request_id]
        limits = self.engine.limits
        room = min(limits.max_model_len, limits.pool_tokens) - len(request.prompt_token_ids)
        max_tokens = min(request.params.max_tokens or room, room)
        expected = continuation(request.prompt_token_ids, VOCAB, {EOS}, max_tokens)
        assert self.answers[event.request_id][event.index] == expected
        assert event.reason == ("stop" if expected[-1] == EOS else "length")
        stats = event.speculation
        assert stats.num_accepted_tokens == sum(stats.accepted_per_position) <= stats.num_draft_tokens
        assert stats.num_draft_tokens == sum(stats.drafted_per_position)
        assert event.usage.completion_tokens == len(expected)
        done = self.done.setdefault(event.request_id, set())
        assert isinstance(done, set) and event.index not in done
        done.add(event.index)

    def _failed(self, event: Failed) -> None:
        request = self.requests[event.request_id]
        assert isinstance(event.error, Cancelled | DeadlineExceeded | EngineFault | NumericFault)
        if isinstance(event.error, NumericFault):
            tokens = [*request.prompt_token_ids, *(t for a in self.answers[event.request_id].values() for t in a)]
            assert POISON in tokens
        if isinstance(event.error, EngineFault):
            assert "planted" in str(event.error)
        if isinstance(event.error, DeadlineExceeded):
            assert request.deadline is not None and request.deadline <= self.now
        self.done[event.request_id] = event.error

    def _started_in_order(self, request: Request) -> None:
        """FIFO inside a class: nobody of the same priority who came earlier is still waiting for a first seat."""
        waiting = [s for s in self.engine.scheduler.waiting if s.cached_tokens is None]
        number = int(request.request_id[1:])
        for sequence in waiting:
            if sequence.request.priority == request.priority:
                assert int(sequence.request.request_id[1:]) > number

    def _published_pages_hold_their_keys(self) -> None:
        entries = list(self.engine.index.entries())
        keys = {key for key, _, _ in entries}
        roots = {root_key(salt) for salt in ("", "other")}
        size = self.engine.pool.page_size
        for key, parent, page in entries:
            tokens = self.runner.slots[page * size : (page + 1) * size]
            assert parent in roots or parent in keys
            assert None not in tokens and page_key(parent, tokens) == key


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
