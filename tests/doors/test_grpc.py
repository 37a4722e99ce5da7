"""The gRPC door and the engine's thread over a fake engine: translation, refusals, cancels, faults, health."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from doors.fake_engine import FakeEngine, Loaded
from doors.serving import Client, serving, text_request, until
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specserve import errors
from specserve.constraint import GrammarSpec
from specserve.events import Delta
from specserve.request import Request, SamplingParams
from specserve.server.grpc import INFERENCE_SERVICE, WIRE_PATHS, sampling_params
from specserve.server.status import to_status
from specserve.server.worker import EngineThread
from specserve.v1 import inference_pb2 as pb


def over_grpc(body: Callable[[Client, FakeEngine], Awaitable[None]]) -> None:
    """Run a test's body against a served fake engine."""

    async def run() -> None:
        loaded = Loaded()
        async with serving(lambda: loaded) as client:
            await body(client, loaded.engine)

    asyncio.run(run())


ANSWER = [100, 101, 102, 103, 104]


def _ids(responses: list[pb.GenerateResponse]) -> list[int]:
    """Token ids of a one-choice answer that ended; how many deltas carried them depends on timing."""
    assert responses[-1].HasField("finished")
    return [token.id for response in responses if response.HasField("delta") for token in response.delta.tokens]


# -- translation ---------------------------------------------------------------------------------------------------


def test_a_stream_tells_everything() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        request = text_request("hello", request_id="mine", cache_salt="s", priority=-3)
        request.sampling.MergeFrom(pb.SamplingParams(n=2, temperature=0.8, seed=2**64 - 1, logprobs=2))
        request.stopping.MergeFrom(pb.StoppingParams(max_tokens=3, min_tokens=1, stop=["x"], stop_token_ids=[9]))
        request.speculation.MergeFrom(pb.SpeculationParams(drafter="ngram", num_draft_tokens=0))
        responses = await client.generate(request)
        assert responses[0].WhichOneof("event") == "started"
        started = responses[0].started
        assert (started.request_id, started.prompt_tokens, started.seed) == ("mine", 5, 2**64 - 1)
        assert started.queue_time.ToMicroseconds() == 1500
        for index in range(2):
            tokens = [t for r in responses if r.HasField("delta") and r.delta.index == index for t in r.delta.tokens]
            assert [token.id for token in tokens] == [100, 101, 102]
            assert [token.drafted for token in tokens] == [False, True, False]
            assert tokens[0].HasField("logprob") and [top.id for top in tokens[0].top_logprobs] == [7, 8]
        ends = [response.finished for response in responses if response.HasField("finished")]
        assert sorted(end.index for end in ends) == [0, 1]
        assert ends[0].reason == pb.FINISH_REASON_LENGTH and ends[0].tail_text == "!"
        assert ends[0].usage.completion_tokens == 3
        stats = ends[0].speculation
        assert (stats.acceptance_length, list(stats.drafted_per_position)) == (1.25, [2, 1])
        assert not stats.HasField("inactive_reason") and ends[0].WhichOneof("stop_match") is None
        assert ends[0].timing.total_time.ToMilliseconds() == 1234
        assert not ends[0].timing.HasField("time_per_token")
        asked = engine.submitted[0]
        assert (asked.cache_salt, asked.priority, asked.deadline) == ("s", -3, None)
        assert (asked.params.temperature, asked.params.stop, asked.params.stop_token_ids) == (0.8, ("x",), (9,))
        assert (asked.params.min_tokens, asked.params.top_p) == (1, 1.0)
        assert (asked.speculation.drafter, asked.speculation.num_draft_tokens) == ("ngram", 0)

    over_grpc(body)


def test_every_form_of_prompt() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        turns = [pb.ChatMessage(role="user", content="hi")]
        responses = await client.generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=turns)))
        await client.generate(pb.GenerateRequest(token_ids=pb.TokenIdsPrompt(ids=[0, 999])))
        await client.generate(text_request("ab", stopping=pb.StoppingParams(ignore_eos=True)))
        prompts = [request.prompt_token_ids for request in engine.submitted]
        assert prompts == [tuple(map(ord, "user:hi\n")), (0, 999), (97, 98)]
        assert engine.submitted[0].params == SamplingParams()
        assert responses[0].started.request_id == engine.submitted[0].request_id

    over_grpc(body)


def test_every_form_of_prediction() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        forms = [pb.Prediction(text="ab"), pb.Prediction(token_ids=pb.TokenIdsPrediction(ids=[0, 999]))]
        for form in (*forms, pb.Prediction(text=""), pb.Prediction(text="x" * 64), None):
            await client.generate(text_request(speculation=pb.SpeculationParams(prediction=form)))
        asked = [request.speculation.prediction for request in engine.submitted]
        assert asked == [(97, 98), (0, 999), (), (120,) * 64, ()]

    over_grpc(body)


def test_server_info() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        info = await client.model.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.model, info.numerics, info.max_model_len, info.pool_tokens) == ("fake", "exact", 64, 640)
        assert tuple(info.drafters) == engine.limits.drafters and info.startup_lines
        assert info.environment == "environment: none"

    over_grpc(body)


def test_stats_are_the_engine_s_counters() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.metrics.speculation.num_committed_tokens = 1 << 40  # totals outgrow 32 bits
        engine.metrics.speculation.num_steps = 1 << 39
        stats = await client.model.GetStats(pb.GetStatsRequest())
        assert (stats.num_preemptions, stats.num_cached_tokens, stats.num_prompt_tokens) == (3, 32, 0)
        assert dict(stats.waits) == {"grammar": 2}
        assert (stats.speculation.num_committed_tokens, stats.speculation.acceptance_length) == (1 << 40, 2.0)

    over_grpc(body)


EVERY_SAMPLING_FIELD = {
    "n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "logprobs": 2,
    "prompt_logprobs": 1, "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25,
    "logit_bias": {3: -100.0, 9: 1.5}, "allowed_token_ids": (3, 9), "bad_words": ("ab", "c"),
    "logprob_token_ids": (9, 3),
}  # fmt: skip


def test_every_sampling_field_arrives() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        request = _sampling(**EVERY_SAMPLING_FIELD, logprobs_mode=pb.LOGPROBS_MODE_PROCESSED)
        responses = await client.generate(request)
        asked = engine.submitted[0]
        assert asked.params == SamplingParams(**EVERY_SAMPLING_FIELD, logprobs_mode="processed")
        assert asked.bad_word_ids == ((97, 98), (99,))
        named = {*EVERY_SAMPLING_FIELD, "logprobs_mode", "json_schema", "json_object", "regex", "lark", "choice"}
        assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == named
        first, *others = responses[0].started.prompt_logprobs
        assert not first.HasField("logprob") and len(others) == len(asked.prompt_token_ids) - 1
        assert [(entry.logprob, entry.top_logprobs[0].id) for entry in others] == [(-0.25, 5)] * len(others)
        tokens = [token for r in responses if r.HasField("delta") for token in r.delta.tokens]
        assert all(list(token.chosen_logprobs) == [-9.0, -3.0] for token in tokens)

    over_grpc(body)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ({"json_schema": '{"type": "object"}'}, GrammarSpec("json_schema", '{"type": "object"}')),
        ({"json_object": pb.JsonObject()}, GrammarSpec("json_object")),
        ({"regex": "[0-9]+"}, GrammarSpec("regex", "[0-9]+")),
        ({"lark": 'start: "a"'}, GrammarSpec("lark", 'start: "a"')),
        ({"choice": pb.Choice(texts=["yes", "no"])}, GrammarSpec("choice", ("yes", "no"))),
    ],
)
def test_every_constraint_arrives(field: dict[str, Any], spec: GrammarSpec) -> None:
    assert sampling_params(_sampling(**field)) == SamplingParams(grammar=spec)


# -- refusals ------------------------------------------------------------------------------------------------------


def _sampling(**fields: Any) -> pb.GenerateRequest:
    return text_request(sampling=pb.SamplingParams(**fields))


def _stopping(**fields: Any) -> pb.GenerateRequest:
    return text_request(stopping=pb.StoppingParams(**fields))


def _prediction(**content: Any) -> pb.GenerateRequest:
    return text_request(speculation=pb.SpeculationParams(prediction=pb.Prediction(**content)))


BAD_FIELDS = [
    ("sampling.n", _sampling(n=0)),
    ("sampling.n", _sampling(n=5)),
    ("sampling.temperature", _sampling(temperature=-1)),
    ("sampling.temperature", _sampling(temperature=float("nan"))),
    ("sampling.top_p", _sampling(top_p=0)),
    ("sampling.top_k", _sampling(top_k=-1)),
    ("sampling.min_p", _sampling(min_p=1.5)),
    ("sampling.logprobs", _sampling(logprobs=21)),
    ("sampling.logprobs_mode", _sampling(logprobs_mode=7)),
    ("sampling.repetition_penalty", _sampling(repetition_penalty=0)),
    ("sampling.repetition_penalty", _sampling(repetition_penalty=float("inf"))),
    ("sampling.presence_penalty", _sampling(presence_penalty=2.5)),
    ("sampling.frequency_penalty", _sampling(frequency_penalty=float("nan"))),
    ("sampling.logit_bias[3]", _sampling(logit_bias={3: 101.0})),
    ("sampling.logit_bias[1000]", _sampling(logit_bias={1000: 1.0})),
    ("sampling.allowed_token_ids[1]", _sampling(allowed_token_ids=[1, 1000])),
    ("sampling.bad_words", _sampling(bad_words=["a", ""])),
    ("sampling.bad_words", _sampling(bad_words=["a"] * 257)),
    ("sampling.logprob_token_ids[0]", _sampling(logprobs=0, logprob_token_ids=[1000])),
    ("sampling.prompt_logprobs", _sampling(prompt_logprobs=-1)),
    ("sampling.json_schema", _sampling(json_schema="")),
    ("sampling.regex", _sampling(regex="x" * 70_000)),
    ("sampling.lark", _sampling(lark="")),
    ("sampling.choice", _sampling(choice=pb.Choice())),
    ("stopping.max_tokens", _stopping(max_tokens=0)),
    ("stopping.min_tokens", _stopping(min_tokens=-1)),
    ("stopping.min_tokens", _stopping(min_tokens=3, max_tokens=2)),
    ("stopping.stop", _stopping(stop=[""])),
    ("stopping.stop_token_ids[1]", _stopping(stop_token_ids=[1, 1000])),
    ("speculation.drafter", text_request(speculation=pb.SpeculationParams(drafter="ngam"))),
    ("speculation.num_draft_tokens", text_request(speculation=pb.SpeculationParams(num_draft_tokens=65))),
    ("speculation.prediction", _prediction()),
    ("speculation.prediction.text", _prediction(text="x" * 65)),
    ("speculation.prediction.token_ids.ids", _prediction(token_ids=pb.TokenIdsPrediction(ids=[1] * 65))),
    ("speculation.prediction.token_ids.ids[1]", _prediction(token_ids=pb.TokenIdsPrediction(ids=[1, 1000]))),
    ("prompt", pb.GenerateRequest()),
    ("prompt", text_request("")),
    ("chat.messages", pb.GenerateRequest(chat=pb.ChatPrompt())),
    ("chat.messages[0].role", pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")]))),
    ("token_ids.ids[1]", pb.GenerateRequest(token_ids=pb.TokenIdsPrompt(ids=[1, 4_000_000_000]))),
    ("cache_salt", text_request(cache_salt="s" * 257)),
    ("request_id", text_request(request_id="r" * 257)),
]


def test_every_bad_field_is_named_and_never_reaches_the_engine() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        for field, request in BAD_FIELDS:
            refusal = await client.refused(request)
            assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT"), field
            assert refusal.fields is not None and list(refusal.fields) == [field]
            assert refusal.fields[field] in refusal.message and not refusal.retry
        assert engine.submitted == []
        assert _ids(await client.generate(text_request())) == ANSWER

    over_grpc(body)


def test_all_bad_fields_are_named_at_once() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        request = text_request(sampling=pb.SamplingParams(n=0, top_p=0, temperature=-1))
        refusal = await client.refused(request)
        assert set(refusal.fields or ()) == {"sampling.n", "sampling.top_p", "sampling.temperature"}

    over_grpc(body)


def test_too_long_a_prompt_tells_both_numbers() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        refusal = await client.refused(text_request("x" * 64))
        assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED")
        assert refusal.metadata == {"limit": "64", "got": "65"}
        # 8 MiB of text is above gRPC's default limit: our own answer must come first.
        refusal = await client.refused(text_request("x" * (8 << 20)))
        assert refusal.reason == "CONTEXT_LENGTH_EXCEEDED"

    over_grpc(body)


def test_a_refusal_that_quotes_the_caller_still_fits_its_trailer() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        for letter in ("x", "é", "😀"):
            long_name = pb.SpeculationParams(drafter=letter * 100_000, num_draft_tokens=-1)
            request = text_request(speculation=long_name, cache_salt="s" * 300)
            request.sampling.MergeFrom(pb.SamplingParams(n=0, temperature=-1, top_p=0, top_k=-1, min_p=-1))
            refusal = await client.refused(request)
            assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
            assert len(refusal.fields or ()) == 8

    over_grpc(body)


def _all_errors(root: type[errors.SpecserveError]) -> list[type[errors.SpecserveError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_errors(child))]


@pytest.mark.parametrize("kind", _all_errors(errors.SpecserveError))
def test_every_error_has_a_status(kind: type[errors.SpecserveError]) -> None:
    if issubclass(kind, errors.InvalidRequest):
        error = kind([errors.FieldViolation("top_k", "is bad")], metadata={"limit": "1"})
    else:
        error = kind("it is bad", metadata={"limit": "1"})
    status = to_status(error, WIRE_PATHS)
    assert code_pb2.Code.Name(status.code) == kind.status != "OK"
    assert status.message == error.message
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "specserve", {"limit": "1"})
    assert any(d.Unpack(bad) for d in status.details) == issubclass(kind, errors.InvalidRequest)
    assert [v.field for v in bad.field_violations] in ([], ["sampling.top_k"])
    assert any(d.Unpack(retry) for d in status.details) == (kind.status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"))


def test_a_foreign_error_does_not_tell_its_text() -> None:
    status = to_status(ValueError("another caller's prompt"))
    assert code_pb2.Code.Name(status.code) == "INTERNAL"
    assert "ValueError" in status.message and "prompt" not in status.message


def test_overload_says_when_to_come_back() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.submit_error = errors.Overloaded("1,024 requests wait; try again later")
        refusal = await client.refused(text_request())
        assert (refusal.code, refusal.reason, refusal.retry) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", True)
        engine.submit_error = RuntimeError("boom")
        assert (await client.refused(text_request())).reason == "ENGINE_FAULT"
        engine.submit_error = None
        assert _ids(await client.generate(text_request())) == ANSWER

    over_grpc(body)


# -- cancels and deadlines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "close channel"])
def test_leaving_aborts_before_the_next_step(how: str) -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.hold_at = 2
        call = client.inference.Generate(_stopping(max_tokens=40))
        await call.read()
        mate = asyncio.create_task(client.thread_generate(_request("mate")))
        await until(lambda: len(engine.live) == 2)
        engine.may_step.clear()
        if how == "cancel":
            call.cancel()
        else:
            await client.channel.close()
        # Let the cancel travel while the engine is held inside a step.
        await asyncio.sleep(0.3)
        held_in = engine.num_steps
        engine.may_step.set()
        await until(lambda: bool(engine.aborted))
        assert engine.steps_at_abort[0] <= held_in + 1
        engine.hold_at = None
        assert [t.token_id for e in await mate if isinstance(e, Delta) for t in e.tokens] == ANSWER
        assert len(engine.aborted) == 1 and engine.aborted != ["mate"]

    over_grpc(body)


def test_a_deadline_ends_queued_and_running_requests() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.hold_at = 0
        refusal = await client.refused(text_request(), timeout=1)
        assert refusal.code == "DEADLINE_EXCEEDED"
        assert engine.submitted[0].deadline is not None
        await until(lambda: not engine.live)
        engine.hold_at = None
        assert _ids(await client.generate(text_request(), timeout=20)) == ANSWER

    over_grpc(body)


def test_a_deadline_that_the_engine_finds_has_details() -> None:
    async def run() -> None:
        loaded = Loaded()
        async with serving(lambda: loaded) as client:
            request = _request("late", deadline=loaded.engine.clock() - 1)
            with pytest.raises(errors.DeadlineExceeded) as caught:
                await client.thread_generate(request)
            assert to_status(caught.value).details[0].type_url.endswith("ErrorInfo")

    asyncio.run(run())


# -- the engine's thread -------------------------------------------------------------------------------------------


def _request(request_id: str, max_tokens: int | None = None, deadline: float | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=request_id, prompt_token_ids=(1, 2), params=params, deadline=deadline)


def test_a_failed_step_fails_who_was_in_it_and_nobody_else() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.hold_at = 0
        both = [asyncio.create_task(client.refused(text_request())) for _ in range(2)]
        await until(lambda: len(engine.live) == 2)
        engine.fault = ZeroDivisionError("planted")
        for refusal in await asyncio.gather(*both):
            assert (refusal.code, refusal.reason) == ("INTERNAL", "ENGINE_FAULT")
            assert "ZeroDivisionError: planted" in refusal.message
        await until(lambda: len(engine.aborted) == 2)
        engine.hold_at = None
        assert _ids(await client.generate(text_request())) == ANSWER
        assert await _health(client) == "SERVING"

    over_grpc(body)


def test_an_engine_that_keeps_failing_is_unhealthy_and_leaves_nobody_hanging() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.faults_when_idle = True
        engine.fault = ZeroDivisionError("planted")
        with pytest.raises((errors.EngineFault, errors.Unavailable)):
            await client.thread_generate(_request("any"))
        await until(client.thread.ended.done)
        refusal = await client.refused(text_request())
        assert (refusal.code, refusal.reason, refusal.retry) == ("UNAVAILABLE", "UNAVAILABLE", True)
        assert refusal.metadata == {"state": "broken"}
        assert await _health(client) == "NOT_SERVING"

    over_grpc(body)


def test_an_idle_engine_is_not_stepped() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        await client.generate(text_request())
        await until(lambda: not engine.live)
        steps = engine.num_steps
        await asyncio.sleep(0.2)
        assert engine.num_steps == steps

    over_grpc(body)


def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        events = client.thread.generate(_request("slow", max_tokens=30))
        await anext(events)
        await until(lambda: bool(engine.submitted) and not engine.live)
        await asyncio.sleep(0.05)
        rest = [event async for event in events]
        deltas = [event for event in rest if isinstance(event, Delta)]
        assert [t.token_id for d in deltas for t in d.tokens] == list(range(100, 130))
        assert len(deltas) <= 3

    over_grpc(body)


def test_closing_the_events_aborts() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        events = client.thread.generate(_request("closed", max_tokens=60))
        await anext(events)
        await events.aclose()
        await until(lambda: engine.aborted == ["closed"])

    over_grpc(body)


def test_stopping_answers_everybody() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.hold_at = 0
        waiting = [asyncio.create_task(client.refused(text_request())) for _ in range(3)]
        await until(lambda: len(engine.live) == 3)
        await asyncio.to_thread(client.thread.stop)
        for refusal in await asyncio.gather(*waiting):
            assert (refusal.code, refusal.metadata) == ("UNAVAILABLE", {"state": "stopped"})
        with pytest.raises(errors.Unavailable):
            await client.thread_generate(_request("late"))

    over_grpc(body)


def test_draining_lets_requests_end_and_takes_no_more() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        engine.may_step.clear()
        running = asyncio.create_task(client.generate(text_request()))
        await until(lambda: bool(engine.live))
        draining = asyncio.create_task(client.door.stop(10))
        await asyncio.sleep(0.1)
        assert (await client.refused(text_request())).code == "UNAVAILABLE"
        engine.may_step.set()
        assert (await running)[-1].HasField("finished")
        await draining

    over_grpc(body)


# -- health and reflection -----------------------------------------------------------------------------------------


async def _health(client: Client, service: str = INFERENCE_SERVICE) -> str:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_health_follows_loading() -> None:
    async def run() -> None:
        may_load = threading.Event()

        def load() -> Loaded:
            may_load.wait(10)
            return Loaded()

        async with serving(load, wait_ready=False) as client:
            assert await _health(client) == await _health(client, "") == "NOT_SERVING"
            refusal = await client.refused(text_request())
            assert (refusal.code, refusal.retry, refusal.metadata) == ("UNAVAILABLE", True, {"state": "loading"})
            watch = health_pb2_grpc.HealthStub(client.channel).Watch(
                health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
            )
            await watch.read()
            may_load.set()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await _health(client, "") == "SERVING"
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await _health(client, "no.such.Service")
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


def test_a_model_that_cannot_load_is_told_to_whoever_waits() -> None:
    def load() -> Loaded:
        raise errors.ModelNotFound("no model 'x'")

    thread = EngineThread(load)
    thread.start()
    ready: Future[Any] = thread.ready
    with pytest.raises(errors.ModelNotFound):
        ready.result(10)
    thread.stop()
    with pytest.raises(errors.Unavailable, match="no model 'x'"):
        thread.served()


def test_reflection_lists_the_services() -> None:
    async def body(client: Client, engine: FakeEngine) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            names = {service.name for service in answer.list_services_response.service}
        assert {INFERENCE_SERVICE, "specserve.v1.ModelService", "grpc.health.v1.Health"} <= names

    over_grpc(body)
