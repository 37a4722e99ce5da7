"""How one request is asked, and what a client sees of its answer: over specserve.v1, or an OpenAI endpoint.

A target fills an `Outcome` while the answer comes. HTTP is spoken by hand over one connection a request: a client
library would be a dependency, and what is needed of it is a POST and a stream of lines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from specserve.errors import ConfigError, EngineFault
from specserve.events import SpeculationStats
from specserve.loadgen.workload import Job, as_text

CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request. Times are seconds of `time.perf_counter`; `chunks` are (time, tokens).

    Ids, `finish_reason` ("stop", "length") and `stats` are told by our own servers only.
    """

    sent_at: float
    ended_at: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: SpeculationStats | None = None
    error: str | None = None

    def take(self, num_tokens: int) -> None:
        """Tokens arrived now."""
        self.chunks.append((time.perf_counter(), num_tokens))
        self.output_tokens += num_tokens

    @property
    def ttft(self) -> float:
        return self.chunks[0][0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 where there is none, as `vllm bench serve` counts it."""
        return (self.chunks[-1][0] - self.chunks[0][0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks: with speculation a chunk carries several tokens."""
        times = [moment for moment, _ in self.chunks]
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the target tells of itself; zero where it does not."""

    model: str
    environment: str = "unknown"
    max_len: int = 0
    vocab_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals of the server, None where it does not tell."""

    num_preemptions: int | None = None
    speculation: SpeculationStats | None = None


class Target(Protocol):
    """A server to load."""

    async def facts(self) -> ServerFacts: ...

    async def counters(self) -> Counters: ...

    async def ask(self, job: Job, outcome: Outcome) -> None:
        """Ask, and fill `outcome` as the answer comes.

        Raises:
            EngineFault: the server refused or failed; the message is its own.
        """
        ...

    async def close(self) -> None: ...


class GrpcTarget:
    """specserve.v1 on one channel. `drafter` and `num_draft_tokens` None follow the server; each object has a cache
    salt of its own."""

    def __init__(
        self,
        address: str,
        temperature: float,
        seed: int,
        ignore_eos: bool,
        drafter: str | None,
        num_draft_tokens: int | None = None,
    ) -> None:
        import grpc

        from specserve.v1 import inference_pb2_grpc as pb_grpc

        self._grpc = grpc
        self._address = address
        # one subchannel per object, so that targets of one process do not share a connection
        self._channel = grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._inference = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._model = pb_grpc.ModelServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sampling: dict[str, Any] = {"temperature": temperature, "seed": seed}
        self._ignore_eos = ignore_eos
        self._speculation: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
        if num_draft_tokens is not None:
            self._speculation["num_draft_tokens"] = num_draft_tokens
        self._salt = f"bench-{secrets.token_hex(4)}"

    async def facts(self) -> ServerFacts:
        from specserve.v1 import inference_pb2 as pb

        info = await self._call(self._model.GetServerInfo(pb.GetServerInfoRequest(), timeout=CONNECT_TIMEOUT_S))
        return ServerFacts(
            model=info.model,
            environment=info.environment,
            max_len=min(info.max_model_len, info.pool_tokens),
            vocab_size=info.vocab_size,
        )

    async def counters(self) -> Counters:
        return Counters(num_preemptions=(await self.stats()).num_preemptions)

    async def stats(self) -> Any:
        """The server's totals, as GetStats tells them.

        Raises:
            EngineFault: there is no answer.
        """
        from specserve.v1 import inference_pb2 as pb

        return await self._call(self._model.GetStats(pb.GetStatsRequest(), timeout=CONNECT_TIMEOUT_S))

    async def ask(self, job: Job, outcome: Outcome) -> None:
        from specserve.v1 import inference_pb2 as pb

        call = self._inference.Generate(self._request(job))
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "started":
                        outcome.prompt_tokens = response.started.prompt_tokens
                        outcome.cached_tokens = response.started.cached_tokens
                    case "delta":
                        outcome.take(len(response.delta.tokens))
                        outcome.token_ids += [token.id for token in response.delta.tokens]
                    case "finished":
                        outcome.stats = speculation_stats(response.finished.speculation)
                        reason = pb.FinishReason.Name(response.finished.reason)
                        outcome.finish_reason = reason.removeprefix("FINISH_REASON_").lower()
        except self._grpc.RpcError as error:
            raise self._fault(error) from None

    async def close(self) -> None:
        await self._channel.close()

    def _request(self, job: Job) -> Any:
        from specserve.v1 import inference_pb2 as pb

        if isinstance(job.prompt, str):
            prompt = {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=job.prompt)])}
        else:
            prompt = {"token_ids": pb.TokenIdsPrompt(ids=job.prompt)}
        return pb.GenerateRequest(
            sampling=pb.SamplingParams(**self._sampling),
            stopping=pb.StoppingParams(max_tokens=job.max_tokens, ignore_eos=self._ignore_eos),
            speculation=pb.SpeculationParams(**self._speculation) if self._speculation else None,
            cache_salt=self._salt,
            **prompt,
        )

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except self._grpc.RpcError as error:
            raise self._fault(error) from None

    def _fault(self, error: Any) -> EngineFault:
        return EngineFault(f"{self._address} answered {error.code().name}: {error.details()}")


def speculation_stats(message: Any) -> SpeculationStats:
    return SpeculationStats(
        drafter=message.drafter,
        num_steps=message.num_steps,
        num_committed_tokens=message.num_committed_tokens,
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        accepted_per_position=list(message.accepted_per_position),
        drafted_per_position=list(message.drafted_per_position),
        inactive_reason=message.inactive_reason or None,
        steps_by_tokens=list(message.steps_by_tokens),
    )


class OpenAiTarget:
    """An OpenAI endpoint: prompts of ids go to /v1/completions as words, prompts of text to /v1/chat/completions."""

    def __init__(self, base_url: str, model: str, temperature: float, seed: int, ignore_eos: bool) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url is {base_url!r}; give http://host:port")
        self._host, self._tls = url.hostname, url.scheme == "https"
        self._port = url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "seed": seed, "stream": True}
        self._body["stream_options"] = {"include_usage": True}
        if ignore_eos:
            self._body["ignore_eos"] = True

    async def facts(self) -> ServerFacts:
        return ServerFacts(model=self._body["model"])

    async def counters(self) -> Counters:
        try:
            text = "\n".join([line async for line in self._lines("GET", "/metrics", None)])
        except EngineFault:
            return Counters()
        return prometheus_counters(text)

    async def ask(self, job: Job, outcome: Outcome) -> None:
        body = {**self._body, "max_tokens": job.max_tokens}
        if isinstance(job.prompt, str):
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": job.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", as_text(job.prompt)
        async for line in self._lines("POST", path, body):
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                self._take(json.loads(line[5:]), outcome)

    async def close(self) -> None:
        """Every request has closed its own connection."""

    @staticmethod
    def _take(chunk: dict[str, Any], outcome: Outcome) -> None:
        if "error" in chunk:
            raise EngineFault(f"the stream ended with {chunk['error']}")
        for choice in chunk.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                # how many tokens a chunk holds is not told, unless the server lists their ids
                outcome.take(len(choice.get("token_ids") or ()) or 1)
        if usage := chunk.get("usage"):
            outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
            outcome.prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def _lines(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[str]:
        """Lines of one answer's body.

        Raises:
            EngineFault: no connection, or a status other than 200.
        """
        try:
            context = ssl.create_default_context() if self._tls else None
            opening = asyncio.open_connection(self._host, self._port, ssl=context)
            reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise EngineFault(f"cannot connect to {self._host}:{self._port}: {error}") from None
        try:
            writer.write(self._head(method, path, body))
            status = (await reader.readline()).decode("latin-1").split()
            headers = [line.lower() async for line in _split(_until_blank(reader))]
            chunked = any(line.startswith("transfer-encoding:") and "chunked" in line for line in headers)
            lines = _split(_chunks(reader) if chunked else _rest(reader))
            if len(status) < 2 or status[1] != "200":
                text = " ".join([line async for line in lines])[:500]
                raise EngineFault(f"{path} answered {' '.join(status[1:]) or 'nothing'}: {text}")
            async for line in lines:
                yield line
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EngineFault(f"the connection broke: {error}") from None
        finally:
            writer.close()

    def _head(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def _until_blank(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while (line := await reader.readline()).strip():
        yield line


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _split(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Lines, wherever the parts were cut."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace")


def prometheus_counters(text: str) -> Counters:
    """What vLLM's metric names tell of speculation and preemptions, summed over labels."""
    totals: dict[str, int] = {}
    accepted: dict[int, int] = {}
    pattern = r"^vllm:(num_preemptions|spec_decode_num_\w+?)_total(?:\{(.*)\})?\s+(\S+)"
    for name, labels, value in re.findall(pattern, text, re.MULTILINE):
        totals[name] = totals.get(name, 0) + int(float(value))
        position = re.search(r'position="(\d+)"', labels)
        if position is not None:
            accepted[int(position[1])] = accepted.get(int(position[1]), 0) + int(float(value))
    stats = None
    if drafts := totals.get("spec_decode_num_drafts"):
        stats = SpeculationStats(
            drafter="all",
            num_drafts=drafts,
            num_draft_tokens=totals.get("spec_decode_num_draft_tokens", 0),
            num_accepted_tokens=totals.get("spec_decode_num_accepted_tokens", 0),
            accepted_per_position=[accepted.get(i, 0) for i in range(max(accepted, default=-1) + 1)],
        )
    return Counters(num_preemptions=totals.get("num_preemptions"), speculation=stats)
