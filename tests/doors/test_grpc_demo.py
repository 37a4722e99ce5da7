"""The whole route on the demo model: sixteen streams at once, one of them cancelled, none of the others the wiser."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from doors.serving import Client, serving, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve.build import Built, build
from specserve.config import EngineConfig
from specserve.engine import Engine
from specserve.events import Event
from specserve.grammar import Grammar
from specserve.request import Request
from specserve.v1 import inference_pb2 as pb

pytestmark = pytest.mark.demo

NUM_STREAMS = 16
NUM_TOKENS = 12
CANCELLED = 5
SUBJECTS = (
    "rain", "a lighthouse", "bread", "chess", "the moon", "a library", "bees", "snow",
    "a violin", "tea", "maps", "a fox", "salt", "trains", "a garden", "glass",
)  # fmt: skip


class WatchedEngine:
    """The real engine; looks at the pool around every abort, and refuses pages that stay held."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_aborted = 0
        self.num_freed = 0
        self.most_at_once = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, grammar: Grammar | None = None) -> None:
        self._engine.submit(request, grammar)

    def step(self) -> Sequence[Event]:
        events = self._engine.step()
        self._engine.pool.check()
        self.most_at_once = max(self.most_at_once, len(self._engine.pool.tables))
        return events

    def abort(self, request_id: str) -> None:
        pool, running = self._engine.pool, self._engine.scheduler.running
        own = {page for s in running if s.request.request_id == request_id for page in s.table.pages}
        kept = {page for s in running if s.request.request_id != request_id for page in s.table.pages}
        self._engine.abort(request_id)
        pool.check()
        held = {page for table in pool.tables for page in table.pages}
        assert held == kept, "pages of an aborted request are still held"
        self.num_aborted += 1
        self.num_freed += len(own - kept)


@dataclass
class Watched:
    """A `Built` whose engine is watched."""

    built: Built
    engine: WatchedEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = WatchedEngine(self.built.engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.built, name)


@pytest.fixture(scope="module")
def built(demo_folder: Path) -> Built:
    config = EngineConfig.from_options(model=str(demo_folder), kv_cache_gib=0.25, max_model_len=1024)
    return build(config)


def _request(index: int, max_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    """Every other one sampled; prompts differ, and share the template's opening."""
    text = f"Tell me about {SUBJECTS[index]}. {'Please use short words. ' * (index % 4)}"
    sampling = pb.SamplingParams(temperature=0.8 * (index % 2), seed=index)
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling=sampling,
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def _ids(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token.id for response in responses if response.HasField("delta") for token in response.delta.tokens]


async def _read_three_then_cancel(client: Client) -> None:
    call = client.inference.Generate(_request(CANCELLED, max_tokens=400))
    for _ in range(3):
        assert await call.read() is not grpc.aio.EOF
    call.cancel()


def test_a_cancel_among_sixteen_streams(built: Built) -> None:
    async def run() -> None:
        watched = Watched(built)
        others = [index for index in range(NUM_STREAMS) if index != CANCELLED]
        async with serving(lambda: watched) as client:
            alone = {index: _ids(await client.generate(_request(index))) for index in others}
            cancelled = asyncio.create_task(_read_three_then_cancel(client))
            answers = await asyncio.gather(*(client.generate(_request(index)) for index in others))
            await cancelled
            await until(lambda: watched.engine.num_aborted == 1)
            await until(lambda: not built.engine.has_work())
        assert watched.engine.most_at_once == NUM_STREAMS and watched.engine.num_freed >= 1
        assert built.engine.pool.num_referenced == 0
        for index, answer in zip(others, answers, strict=True):
            assert answer[-1].HasField("finished") and len(_ids(answer)) == NUM_TOKENS
            assert _ids(answer) == alone[index], f"prompt {index} answered otherwise among others"

    asyncio.run(run())


def test_a_deadline_frees_its_pages_and_health_answers(built: Built) -> None:
    async def run() -> None:
        async with serving(lambda: Watched(built)) as client:
            refusal = await client.refused(_request(0, max_tokens=900), timeout=0.5)
            assert refusal.code == "DEADLINE_EXCEEDED"
            await until(lambda: not built.engine.has_work())
            assert built.engine.pool.num_referenced == 0
            stub = health_pb2_grpc.HealthStub(client.channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="specserve.v1.InferenceService"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(run())


def test_a_wire_answer_is_what_the_tokenizer_says(built: Built) -> None:
    async def run() -> None:
        async with serving(lambda: Watched(built)) as client:
            request = _request(3, max_tokens=24)
            request.sampling.n = 2
            responses = await client.generate(request)
        assert [r.WhichOneof("event") for r in responses].count("started") == 1
        ends = {r.finished.index: r.finished for r in responses if r.HasField("finished")}
        assert sorted(ends) == [0, 1]
        for index, end in ends.items():
            mine = [r.delta for r in responses if r.HasField("delta") and r.delta.index == index]
            tokens = [token for delta in mine for token in delta.tokens]
            text = "".join(token.text for token in tokens) + end.tail_text
            assert text == built.tokenizer.decode([token.id for token in tokens])
            assert end.usage.completion_tokens == len(tokens) == 24
            assert sum(token.drafted for token in tokens) == end.speculation.num_accepted_tokens

    asyncio.run(run())


def test_an_answer_keeps_its_form(built: Built) -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with serving(lambda: Watched(built)) as client:
            request = _request(4)
            request.sampling.choice.texts.extend(["perhaps", "never"])
            responses = await client.generate(request)
            text = "".join(t.text for r in responses if r.HasField("delta") for t in r.delta.tokens)
            assert text + responses[-1].finished.tail_text in ("perhaps", "never")
            request = _request(4)
            request.sampling.json_schema = '{"type": "no-such-type"}'
            for _ in range(2):
                refusal = await client.refused(request)
                assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "GRAMMAR_INVALID")
                assert list(refusal.fields or ()) == ["sampling.json_schema"]

    asyncio.run(run())


def test_prompt_logprobs_and_chosen_ones_cross_the_wire(built: Built) -> None:
    async def run() -> None:
        async with serving(lambda: Watched(built)) as client:
            request = _request(2, max_tokens=3)
            fields = {"logprobs": 1, "logprob_token_ids": [5, 6], "prompt_logprobs": 2}
            request.sampling.MergeFrom(pb.SamplingParams(**fields))
            responses = await client.generate(request)
        started = responses[0].started
        assert len(started.prompt_logprobs) == started.prompt_tokens and started.cached_tokens == 0
        assert not started.prompt_logprobs[0].HasField("logprob")
        assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in started.prompt_logprobs[1:])
        tokens = [token for r in responses if r.HasField("delta") for token in r.delta.tokens]
        assert all(len(token.chosen_logprobs) == 2 and max(token.chosen_logprobs) < 0 for token in tokens)

    asyncio.run(run())
