"""The gRPC door: `specserve.v1` in, `Request` through the shared `validate`, events back as they are committed.

A refusal or failure becomes one status with details (`status.py`); deadlines and cancels reach the engine before
its next step, because leaving `AsyncEngine.generate` in any way aborts the request. Health says SERVING while the
engine is loaded and alive, and NOT_SERVING while it loads, drains or is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from specserve import __version__
from specserve.constraint import GRAMMAR_KINDS, GrammarSpec
from specserve.errors import ConfigError, FieldViolation, InvalidRequest
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
)
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.server import AsyncEngine, Served, TextTokenizer, done
from specserve.server.status import to_status
from specserve.v1 import inference_pb2 as pb
from specserve.v1 import inference_pb2_grpc as pb_grpc
from specserve.validation import validate

INFERENCE_SERVICE = "specserve.v1.InferenceService"
MODEL_SERVICE = "specserve.v1.ModelService"
MAX_LABEL_LEN = 256
# Longer texts are tokenised on another thread: 4,096 characters take about a millisecond.
LONG_TEXT_CHARS = 4096
OPTIONS = [
    # Far above what our own limits allow, so that they answer first, with details.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Two servers must not share a port silently.
    ("grpc.so_reuseport", 0),
    # Reap peers that vanished, and allow their pings (gateways ping idle connections every 30 s).
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
# Where a field of `Request` stands in GenerateRequest; fields that are not here have the same name.
WIRE_PATHS = {
    **{name: f"sampling.{name}" for name in pb.SamplingParams.DESCRIPTOR.fields_by_name},
    **{name: f"stopping.{name}" for name in pb.StoppingParams.DESCRIPTOR.fields_by_name},
    **{f"grammar.{kind}": f"sampling.{kind}" for kind in GRAMMAR_KINDS},
    "prompt_token_ids": "token_ids.ids",
    "messages": "chat.messages",
}
LOGPROBS_MODES = {
    pb.LOGPROBS_MODE_UNSPECIFIED: "raw",
    pb.LOGPROBS_MODE_RAW: "raw",
    pb.LOGPROBS_MODE_PROCESSED: "processed",
}
NUMBERS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "prompt_logprobs",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def _refuse(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])


def _given(message: Any, *names: str) -> dict[str, Any]:
    """The optional fields among `names` that the caller set; the others keep our defaults."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def sampling_params(message: pb.GenerateRequest) -> SamplingParams:
    """`sampling` and `stopping` of a request as one record.

    Raises:
        InvalidRequest: the log-probability mode is not one that we know.
    """
    sampling, stopping = message.sampling, message.stopping
    if sampling.logprobs_mode not in LOGPROBS_MODES:
        raise _refuse("logprobs_mode", f"is {sampling.logprobs_mode}; allowed: RAW (1), PROCESSED (2)")
    return SamplingParams(
        **_given(sampling, *NUMBERS),
        **_given(stopping, "max_tokens", "min_tokens"),
        grammar=_grammar(sampling),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop_str_in_output=stopping.include_stop_str_in_output,
        logprobs_mode=LOGPROBS_MODES[sampling.logprobs_mode],
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=tuple(sampling.allowed_token_ids) or None,
        bad_words=tuple(sampling.bad_words),
        logprob_token_ids=tuple(sampling.logprob_token_ids),
    )


def _grammar(sampling: pb.SamplingParams) -> GrammarSpec | None:
    match sampling.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return GrammarSpec("json_object")
        case "choice":
            return GrammarSpec("choice", tuple(sampling.choice.texts))
        case kind:
            return GrammarSpec(kind, getattr(sampling, kind))


async def prompt_ids(message: pb.GenerateRequest, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Token ids of the prompt in whichever form it came.

    Raises:
        InvalidRequest: there is no prompt, or a conversation without messages or roles.
    """
    form = message.WhichOneof("prompt")
    if form is None:
        raise _refuse("prompt", "is missing; give one of text, chat, token_ids")
    if form == "token_ids":
        return tuple(message.token_ids.ids)
    if form == "text":
        work, size = partial(tokenizer.encode, message.text), len(message.text)
    else:
        messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
        if not messages:
            raise _refuse("chat.messages", "is empty; give at least one message")
        for index, turn in enumerate(messages):
            if not turn["role"]:
                raise _refuse(f"chat.messages[{index}].role", "is empty; give 'system', 'user' or 'assistant'")
        work, size = partial(tokenizer.encode_chat, messages), sum(len(turn["content"]) for turn in messages)
    return tuple(await _tokenised(work, size))


async def _tokenised(work: Callable[[], list[int]], size: int) -> list[int]:
    """What `work` makes of a text of `size` characters."""
    return await asyncio.to_thread(work) if size > LONG_TEXT_CHARS else work()


async def _prediction(message: pb.Prediction, tokenizer: TextTokenizer) -> tuple[int, ...]:
    match message.WhichOneof("content"):
        case "text":
            return tuple(await _tokenised(partial(tokenizer.encode_prediction, message.text), len(message.text)))
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise _refuse("speculation.prediction", "has no content; give one of text, token_ids")


async def speculation_params(message: pb.SpeculationParams, tokenizer: TextTokenizer) -> SpeculationParams:
    """What a request wants of drafting.

    Raises:
        InvalidRequest: there is a prediction without content, or its text is no valid Unicode.
    """
    given = _given(message, "drafter", "num_draft_tokens")
    if message.HasField("prediction"):
        given["prediction"] = await _prediction(message.prediction, tokenizer)
    return SpeculationParams(**given)


async def to_request(message: pb.GenerateRequest, served: Served, time_remaining: float | None) -> Request:
    """The validated request of a message; `time_remaining` in seconds, None = no deadline.

    Raises:
        InvalidRequest: with one violation per bad field.
    """
    arrival = served.engine.clock()
    if len(message.request_id) > MAX_LABEL_LEN:
        raise _refuse("request_id", f"has {len(message.request_id)} characters; allowed: {MAX_LABEL_LEN}")
    request = Request(
        request_id=uuid.uuid4().hex,
        params=sampling_params(message),
        prompt_token_ids=await prompt_ids(message, served.tokenizer),
        speculation=await speculation_params(message.speculation, served.tokenizer),
        priority=message.priority,
        arrival_time=arrival,
        deadline=None if time_remaining is None else arrival + time_remaining,
        cache_salt=message.cache_salt,
    )
    validate(request, served.engine.limits)
    if not request.params.bad_words:
        return request
    # after the gate, which bounds them: two spellings each are tokenised
    bad_word_ids = await asyncio.to_thread(served.tokenizer.bad_word_ids, request.params.bad_words)
    return replace(request, bad_word_ids=bad_word_ids)


def _paths_of_forms(message: pb.GenerateRequest) -> dict[str, str]:
    """Where the fields of `Request` stand that can come in several forms; what refuses them does not know the form."""
    paths = {"grammar": f"sampling.{message.sampling.WhichOneof('constraint')}"}
    match message.speculation.prediction.WhichOneof("content"):
        case "text":
            paths["speculation.prediction"] = "speculation.prediction.text"
        case "token_ids":
            paths["speculation.prediction"] = "speculation.prediction.token_ids.ids"
    return paths


def _duration(milliseconds: float | None) -> Duration | None:
    if milliseconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(max(0, round(milliseconds * 1e6)))
    return duration


def to_response(event: Event, request: Request, label: str) -> pb.GenerateResponse:
    """One event of the engine as a message of the stream. `Failed` is a status, never a message."""
    match event:
        case Started():
            return pb.GenerateResponse(started=_started(event, label or request.request_id))
        case Delta():
            # to_request set it, and the engine counts Timing from there as well
            assert request.arrival_time is not None
            elapsed = _duration((event.time - request.arrival_time) * 1e3)
            tokens = [_token(token) for token in event.tokens]
            return pb.GenerateResponse(delta=pb.Delta(index=event.index, tokens=tokens, elapsed=elapsed))
        case Finished():
            return pb.GenerateResponse(finished=_finished(event))
        case Failed():
            raise event.error


def _started(event: Started, label: str) -> pb.Started:
    return pb.Started(
        request_id=label,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        queue_time=_duration(event.queue_ms),
        seed=event.seed,
        numerics=event.numerics,
        verification=event.verification,
        drafter=event.drafter,
        prompt_logprobs=[_prompt_logprobs(entry) for entry in event.prompt_logprobs or ()],
    )


def _prompt_logprobs(entry: TokenLogprobs | None) -> pb.TokenLogprobs:
    return pb.TokenLogprobs() if entry is None else pb.TokenLogprobs(logprob=entry.logprob, top_logprobs=_top(entry))


def _top(entry: TokenLogprobs) -> list[pb.TopLogprob]:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return [pb.TopLogprob(id=top_id, logprob=value) for top_id, value in pairs]


def _token(token: Token) -> pb.Token:
    message = pb.Token(id=token.token_id, text=token.text, drafted=token.drafted)
    if token.logprobs is not None:
        message.logprob = token.logprobs.logprob
        message.top_logprobs.extend(_top(token.logprobs))
        message.chosen_logprobs.extend(token.logprobs.chosen_logprobs)
    return message


def _finished(event: Finished) -> pb.Finished:
    message = pb.Finished(
        index=event.index,
        reason=FINISH_REASONS[event.reason],
        tail_text=event.tail_text,
        usage=pb.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=event.usage.cached_tokens,
        ),
        speculation=_speculation(event.speculation),
        timing=_timing(event.timing),
    )
    if isinstance(event.stop_match, str):
        message.stop_string = event.stop_match
    elif event.stop_match is not None:
        message.stop_token_id = event.stop_match
    return message


def _speculation(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        drafter=stats.drafter,
        num_steps=stats.num_steps,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        acceptance_length=stats.acceptance_length,
        accepted_per_position=stats.accepted_per_position,
        drafted_per_position=stats.drafted_per_position,
        inactive_reason=stats.inactive_reason,
        num_committed_tokens=stats.num_committed_tokens,
        steps_by_tokens=stats.steps_by_tokens,
    )


def _timing(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue_time=_duration(timing.queue_ms),
        time_to_first_token=_duration(timing.ttft_ms),
        time_per_token=_duration(timing.tpot_ms),
        total_time=_duration(timing.e2e_ms),
    )


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """`Generate` over an `AsyncEngine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def Generate(self, message: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        try:
            request = await to_request(message, self._engine.served(), context.time_remaining())
            # A cancel that arrives while a write is blocked closes this generator; aclosing passes that on.
            async with contextlib.aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    yield to_response(event, request, message.request_id)
        except Exception as error:
            await _abort(context, error, {**WIRE_PATHS, **_paths_of_forms(message)})


class ModelServicer(pb_grpc.ModelServiceServicer):
    """`GetServerInfo` and `GetStats` over an `AsyncEngine`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        served = await self._served(context)
        limits = served.engine.limits
        return pb.GetServerInfoResponse(
            model=served.model_name,
            version=__version__,
            numerics=served.engine.config.numerics,
            drafters=limits.drafters,
            max_model_len=limits.max_model_len,
            pool_tokens=limits.pool_tokens,
            page_size=limits.page_size,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            startup_lines=served.startup_lines,
            environment=served.environment,
        )

    async def GetStats(self, message: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        metrics = (await self._served(context)).engine.metrics
        return pb.GetStatsResponse(
            num_forwards=metrics.num_forwards,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_tokens=metrics.num_cached_tokens,
            num_output_tokens=metrics.num_output_tokens,
            num_preemptions=metrics.num_preemptions,
            speculation=_speculation(metrics.speculation),
            step_time=_duration(1e3 * metrics.step_seconds),
            draft_time=_duration(1e3 * metrics.draft_seconds),
            verify_time=_duration(1e3 * metrics.verify_seconds),
            waits=metrics.waits,
        )

    async def _served(self, context: Any) -> Served:
        try:
            return self._engine.served()
        except Exception as error:
            await _abort(context, error)
            raise


async def _abort(context: Any, error: Exception, paths: Mapping[str, str] = WIRE_PATHS) -> None:
    await context.abort_with_status(rpc_status.to_status(to_status(error, paths)))


class GrpcDoor:
    """A gRPC server with inference, model, health and reflection services over one engine."""

    def __init__(self, engine: AsyncEngine, host: str = "127.0.0.1", port: int = 0) -> None:
        self._engine = engine
        self._address = host, port
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()
        self._follower: asyncio.Task[None] | None = None
        pb_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(engine), self._server)  # type: ignore[no-untyped-call]
        pb_grpc.add_ModelServiceServicer_to_server(ModelServicer(engine), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (INFERENCE_SERVICE, MODEL_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = self._address
        try:
            bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(f"cannot listen on {host}:{port}; is the port taken? --port 0 picks a free one")
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        self._follower = asyncio.create_task(self._follow_engine())
        return int(bound)

    async def stop(self, grace: float) -> None:
        """Refuse new requests, let those in flight end for `grace` seconds, then cancel them."""
        if self._follower is not None:
            self._follower.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)

    async def _follow_engine(self) -> None:
        await done(self._engine.ready)
        if self._engine.ready.exception() is None:
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
            await done(self._engine.ended)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(self, status: Any) -> None:
        for service in ("", INFERENCE_SERVICE, MODEL_SERVICE):
            await self._health.set(service, status)
