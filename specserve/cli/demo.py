"""`specserve demo`: a server, one real prompt over gRPC, and what speculation did to it.

The prompt is answered three times, greedily: once as it streams, then measured with speculation on and off. The
salts keep the measured answers from finding each other's prompt in the prefix cache.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.serve import READY
from specserve.errors import EngineFault

if TYPE_CHECKING:
    from specserve.v1 import inference_pb2 as pb

PROMPT = "Write a Python class for a stack with push, pop, peek and is_empty, with a docstring for each method."
TIMEOUT_S = 600
STOP_TIMEOUT_S = 20


@dataclass
class Answer:
    """What came back over one stream."""

    token_ids: list[int] = field(default_factory=list)
    end: Any = None


def demo(
    model: options.Model = "demo",
    max_tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 128,
) -> None:
    """Start a server, stream an answer from it over gRPC, and compare speculation on and off."""
    import grpc

    answers = {}
    with server(model) as address, grpc.insecure_channel(address) as channel:
        print(f"\n> {PROMPT}\n")
        try:
            _ask(channel, _request(max_tokens), echo=True)
            print()
            for name in ("on", "off"):
                answers[name] = _ask(channel, _request(max_tokens, salt=name, off=name == "off"))
                print(f"speculation {name + ':':4} {_told(answers[name])}")
        except grpc.RpcError as error:
            raise EngineFault(f"the server answered {error.code().name}: {error.details()}") from None
    same = answers["on"].token_ids == answers["off"].token_ids
    print(f"both answers have {'the same' if same else 'DIFFERENT'} token ids")
    if not same:
        raise typer.Exit(1)


@contextmanager
def server(model: str) -> Iterator[str]:
    """A server of our own on a free loopback port; yields its address once it is ready, and ends it."""
    command = [sys.executable, "-m", "specserve.cli", "serve", "--model", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith(READY):
                break
        else:
            raise EngineFault(f"the server ended with exit code {server.wait()} before it was ready")
        yield line.rpartition(" on ")[2].strip()
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _request(max_tokens: int, salt: str = "", off: bool = False) -> pb.GenerateRequest:
    from specserve.v1 import inference_pb2 as pb

    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=PROMPT)]),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
        speculation=pb.SpeculationParams(drafter="off") if off else None,
        cache_salt=salt,
    )


def _ask(channel: Any, request: pb.GenerateRequest, echo: bool = False) -> Answer:
    from specserve.v1.inference_pb2_grpc import InferenceServiceStub

    answer = Answer()
    stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    for response in stub.Generate(request, timeout=TIMEOUT_S):
        text = ""
        if response.HasField("delta"):
            answer.token_ids += [token.id for token in response.delta.tokens]
            text = "".join(token.text for token in response.delta.tokens)
        elif response.HasField("finished"):
            answer.end, text = response.finished, response.finished.tail_text + "\n"
        if echo:
            print(text, end="", flush=True)
    return answer


def _told(answer: Answer) -> str:
    timing, stats = answer.end.timing, answer.end.speculation
    return (
        f"{len(answer.token_ids)} tokens,"
        f" {timing.time_to_first_token.ToTimedelta().total_seconds() * 1e3:.0f} ms to first token,"
        f" {timing.time_per_token.ToTimedelta().total_seconds() * 1e3:.1f} ms per token,"
        f" acceptance length {stats.acceptance_length:.2f} ({stats.drafter})"
    )
