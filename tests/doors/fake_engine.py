"""An engine without a model: one scripted token per live choice and step, and the knobs that a door test needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specserve.config import EngineConfig, ModelLimits
from specserve.errors import Cancelled, DeadlineExceeded, Overloaded
from specserve.events import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    SpeculationStats,
    Started,
    Timing,
    Token,
    TokenLogprobs,
    Usage,
)
from specserve.metrics import EngineMetrics
from specserve.request import Request
from specserve.validation import validate

LIMITS = ModelLimits(
    vocab_size=1000, max_model_len=64, pool_tokens=640, page_size=16, max_num_seqs=4, eos_token_ids=(2,)
)


class FakeEngine:
    """Token i of every choice is id 100 + i, text `<i>`; the answer ends at max_tokens, 5 if unset.

    `may_step` gates each step; `fault` is raised by the next step, `submit_error` by the next submit; while
    `hold_at` is set, no request goes beyond that many tokens.
    """

    limits = LIMITS
    config = EngineConfig()

    def __init__(self) -> None:
        self.clock = time.monotonic
        self.metrics = EngineMetrics(num_preemptions=3, num_cached_tokens=32, waits={"grammar": 2})
        self.may_step = threading.Event()
        self.may_step.set()
        self.fault: Exception | None = None
        self.faults_when_idle = False
        self.submit_error: Exception | None = None
        self.hold_at: int | None = None
        self.live: dict[str, tuple[Request, int]] = {}
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.steps_at_abort: list[int] = []
        self._late: list[Event] = []

    def submit(self, request: Request, grammar: object = None) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        validate(request, self.limits)
        if len(self.live) >= 32:
            raise Overloaded("the queue is full")
        self.submitted.append(request)
        self.live[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)
            self.steps_at_abort.append(self.num_steps)
            self._late.append(Failed(request_id=request_id, error=Cancelled("aborted")))

    def has_work(self) -> bool:
        return bool(self.live or self._late or self.faults_when_idle)

    def step(self) -> Sequence[Event]:
        self.may_step.wait(10)
        time.sleep(0.001)
        self.num_steps += 1
        if self.fault is not None:
            fault = self.fault
            self.fault = fault if self.faults_when_idle else None
            raise fault
        events, self._late = self._late, []
        for request, count in list(self.live.values()):
            events += self._advance(request, count)
        return events

    def _advance(self, request: Request, count: int) -> list[Event]:
        key = request.request_id
        if request.deadline is not None and self.clock() > request.deadline:
            del self.live[key]
            return [Failed(request_id=key, error=DeadlineExceeded("too late", metadata={"phase": "running"}))]
        if self.hold_at is not None and count >= self.hold_at:
            return []
        events: list[Event] = [] if count else [_started(request)]
        last = (request.params.max_tokens or 5) - 1
        for choice in range(request.params.n):
            events.append(_delta(request, choice, count, self.clock()))
            if count == last:
                events.append(_finished(request, choice, count + 1))
        self.live[key] = (request, count + 1)
        if count == last:
            del self.live[key]
        return events


def _started(request: Request) -> Started:
    return Started(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=0,
        queue_ms=1.5,
        seed=request.params.seed if request.params.seed is not None else 2**63 + 1,
        numerics="exact",
        verification="coupled",
        drafter="ngram",
        prompt_logprobs=_prompt_logprobs(request),
    )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    if request.params.prompt_logprobs is None:
        return None
    known = TokenLogprobs(logprob=-0.25, top_ids=(5,), top_logprobs=(-0.125,))
    return (None, *[known] * (len(request.prompt_token_ids) - 1))


def _delta(request: Request, choice: int, count: int, now: float) -> Delta:
    logprobs = None
    if request.params.logprobs is not None:
        chosen = tuple(-float(token_id) for token_id in request.params.logprob_token_ids)
        logprobs = TokenLogprobs(logprob=0.0, top_ids=(7, 8), top_logprobs=(-0.5, -1.5), chosen_logprobs=chosen)
    token = Token(token_id=100 + count, text=f"<{count}>", drafted=count % 2 == 1, logprobs=logprobs)
    return Delta(request_id=request.request_id, index=choice, tokens=(token,), time=now)


def _finished(request: Request, choice: int, count: int) -> Finished:
    stats = SpeculationStats("ngram", 4, 5, 2, 3, 1, [1, 0], [2, 1])
    return Finished(
        request_id=request.request_id,
        index=choice,
        reason=FinishReason.LENGTH,
        tail_text="!",
        usage=Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=count, cached_tokens=0),
        speculation=stats,
        timing=Timing(queue_ms=1.5, ttft_ms=2.0, tpot_ms=None, e2e_ms=1234.5),
        stop_match=2 if request.params.ignore_eos else None,
    )


class FakeTokenizer:
    """One id per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 1000 for letter in text]

    def encode_prediction(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{turn['role']}:{turn['content']}\n" for turn in messages))

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.encode(word)) for word in words)


@dataclass
class Loaded:
    """What `EngineThread` gets from its loader."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    model_name: str = "fake"
    startup_lines: tuple[str, ...] = ("KV cache: 640 tokens",)
    environment: str = "environment: none"
