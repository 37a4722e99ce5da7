"""The engine in process: `LLM(...).generate(prompts, params)`. Names as in vLLM where they mean the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from specserve.build import Built, build
from specserve.config import EngineConfig, SpeculationConfig
from specserve.errors import ConfigError, FieldViolation, InvalidRequest, Overloaded
from specserve.events import Delta, Event, Failed, Finished, SpeculationStats, Started, Timing, TokenLogprobs, Usage
from specserve.grammar import Grammar
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.validation import validate

# one process, one user: stores that are kept per tenant are shared by everything asked here
LOCAL_SALT = "local"

Prompt = str | SequenceOf[int]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMetrics:
    """Counts and times of one choice; attributes named as in `generate --json`."""

    usage: Usage
    speculation: SpeculationStats
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice. `logprobs` has one entry a token when they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None
    metrics: OutputMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt, in order; `metrics` are choice 0's.

    Of several prompts one may fail: its `error` is set then, asking for its `outputs` raises it, and the others stand.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int | None
    choices: tuple[CompletionOutput, ...] = ()
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        if self.error is not None:
            raise self.error
        return self.choices

    @property
    def metrics(self) -> OutputMetrics:
        return self.outputs[0].metrics


class _Collector:
    """Puts the events of one request together."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started: Started | None = None
        self.deltas: dict[int, list[Delta]] = {i: [] for i in range(request.params.n)}
        self.finished: dict[int, Finished] = {}
        self.error: Exception | None = None

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Delta():
                self.deltas[event.index].append(event)
            case Finished():
                self.finished[event.index] = event
            case Failed():
                self.error = event.error

    def take_all(self, events: deque[Event]) -> None:
        while events:
            self.take(events.popleft())

    @property
    def open(self) -> bool:
        return self.error is None and len(self.finished) < self.request.params.n

    def output(self) -> RequestOutput:
        started, request = self.started, self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            seed=request.params.seed if started is None else started.seed,
            choices=() if self.error else tuple(self._choice(index) for index in sorted(self.finished)),
            error=self.error,
            prompt_logprobs=None if started is None else started.prompt_logprobs,
        )

    def _choice(self, index: int) -> CompletionOutput:
        end = self.finished[index]
        tokens = [token for delta in self.deltas[index] for token in delta.tokens]
        wants_logprobs = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(token.text for token in tokens) + end.tail_text,
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason=end.reason.value,
            logprobs=tuple(t.logprobs for t in tokens if t.logprobs is not None) if wants_logprobs else None,
            metrics=OutputMetrics(usage=end.usage, speculation=end.speculation, timing=end.timing),
        )


class LLM:
    """A model and its engine in this process.

    Args:
        model: `demo`, a Hugging Face folder, a .gguf file, or a hub id.
        speculation: "auto", "ngram", "off", or a SpeculationConfig.
        options: engine options by their flat names (`max_num_seqs=8`, `kv_cache_gib=1.0`, …).

    Raises:
        ConfigError: an option is unknown (names the nearest known one) or out of range.
        ModelError: the model cannot be had or used.
    """

    def __init__(self, model: str = "demo", speculation: str | SpeculationConfig = "auto", **options: Any) -> None:
        if isinstance(speculation, str):
            speculation = SpeculationConfig(drafter=speculation)
        if not isinstance(speculation, SpeculationConfig):
            raise ConfigError(f"speculation is {speculation!r}; give a drafter's name or a SpeculationConfig")
        config = EngineConfig.from_options(model=model, speculation=speculation, **options)
        self._built = build(config)
        self._count = 0
        self._events: dict[str, deque[Event]] = {}

    @property
    def built(self) -> Built:
        """The engine, tokenizer and model folder behind this object."""
        return self._built

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        speculation: SpeculationParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several (text, or token ids), batched; results are in the order of the prompts.

        Raises:
            InvalidRequest: a prompt or parameter is refused; nothing was generated.
        """
        batch = _as_prompts(prompts)
        return self._run([self._tokens(prompt) for prompt in batch], _as_params(params, len(batch)), speculation)

    def chat(
        self,
        conversations: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        speculation: SpeculationParams | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {role, content}) or a list of them, through the chat template."""
        batch = _as_conversations(conversations)
        prompts = [tuple(self._built.tokenizer.encode_chat(messages)) for messages in batch]
        return self._run(prompts, _as_params(params, len(batch)), speculation)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: SpeculationParams | None = None
    ) -> Iterator[Event]:
        """The events of one prompt as they happen; a failed request raises its error. Closing it aborts."""
        request = self._request(self._tokens(prompt), params or SamplingParams(), speculation)
        events = self._submit(request, self._grammar(request))
        open_choices = request.params.n
        try:
            while open_choices:
                while not events:
                    self._step()
                event = events.popleft()
                if isinstance(event, Failed):
                    raise event.error
                open_choices -= isinstance(event, Finished)
                yield event
        finally:
            self._close(request)

    def _submit(self, request: Request, grammar: Grammar | None) -> deque[Event]:
        """Put a request in line; its events will come to the returned queue, whoever steps the engine."""
        self._built.engine.submit(request, grammar)
        return self._events.setdefault(request.request_id, deque())

    def _step(self) -> None:
        for event in self._built.engine.step():
            if event.request_id in self._events:
                self._events[event.request_id].append(event)

    def _close(self, request: Request) -> None:
        """Nobody reads this request's events any more."""
        self._built.engine.abort(request.request_id)
        self._events.pop(request.request_id, None)

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._built.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)

    def _request(
        self, prompt: tuple[int, ...], params: SamplingParams, speculation: SpeculationParams | None
    ) -> Request:
        self._count += 1
        return Request(
            request_id=f"llm-{self._count}",
            prompt_token_ids=prompt,
            params=params,
            speculation=speculation or SpeculationParams(),
            cache_salt=LOCAL_SALT,
            bad_word_ids=self._built.tokenizer.bad_word_ids(params.bad_words),
        )

    def _grammar(self, request: Request) -> Grammar | None:
        spec = request.params.grammar
        return None if spec is None else self._built.grammars.compile(spec).get()

    def _run(
        self,
        prompts: list[tuple[int, ...]],
        params: list[SamplingParams],
        speculation: SpeculationParams | None,
    ) -> list[RequestOutput]:
        requests = [self._request(prompt, param, speculation) for prompt, param in zip(prompts, params, strict=True)]
        for request in requests:
            validate(request, self._built.engine.limits)
        grammars = [self._grammar(request) for request in requests]
        todo = deque(zip(requests, grammars, strict=True))
        collectors = {request.request_id: _Collector(request) for request in requests}
        try:
            live: dict[str, _Collector] = {}
            while todo or live:
                live |= {request_id: collectors[request_id] for request_id in self._submit_while_room(todo)}
                self._step()
                for request_id, collector in list(live.items()):
                    collector.take_all(self._events[request_id])
                    if not collector.open:
                        del live[request_id]
        finally:
            for request in requests:
                self._close(request)
        return [collectors[request.request_id].output() for request in requests]

    def _submit_while_room(self, todo: deque[tuple[Request, Grammar | None]]) -> list[str]:
        """Ids of those that found room: many prompts are fed as the line empties."""
        submitted: list[str] = []
        while todo:
            try:
                self._submit(*todo[0])
            except Overloaded:
                if not self._built.engine.has_work():
                    raise
                break
            submitted.append(todo.popleft()[0].request_id)
        return submitted


def _as_prompts(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def _as_conversations(conversations: SequenceOf[Any]) -> list[SequenceOf[Message]]:
    if conversations and isinstance(conversations[0], Mapping):
        return [conversations]
    return list(conversations)


def _as_params(params: SamplingParams | SequenceOf[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(
            [FieldViolation("params", f"has {len(params)} entries for {count} prompts; give one, or one per prompt")]
        )
    return list(params)
