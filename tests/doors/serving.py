"""A door on a free loopback port with a client beside it, for the length of one `async with`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specserve.events import Event
from specserve.request import Request
from specserve.server.grpc import GrpcDoor
from specserve.server.worker import EngineThread
from specserve.v1 import inference_pb2 as pb
from specserve.v1 import inference_pb2_grpc as pb_grpc

WAIT_S = 20


@dataclass
class Client:
    """Stubs of one channel, and the server's side of it."""

    channel: Any
    thread: EngineThread
    door: GrpcDoor
    port: int

    @property
    def inference(self) -> Any:
        return pb_grpc.InferenceServiceStub(self.channel)

    @property
    def model(self) -> Any:
        return pb_grpc.ModelServiceStub(self.channel)

    async def generate(self, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
        return [response async for response in self.inference.Generate(request, **options)]

    async def thread_generate(self, request: Request) -> list[Event]:
        """The same engine without the wire."""
        return [event async for event in self.thread.generate(request)]

    async def refused(self, request: pb.GenerateRequest, **options: Any) -> Refusal:
        try:
            await self.generate(request, **options)
        except grpc.aio.AioRpcError as error:
            return Refusal.of(error)
        raise AssertionError("the request was served")


@dataclass
class Refusal:
    """A non-OK status, taken apart."""

    code: str
    message: str
    reason: str | None = None
    metadata: dict[str, str] | None = None
    fields: dict[str, str] | None = None
    retry: bool = False

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Refusal:
        refusal = cls(error.code().name, error.details() or "")
        status = rpc_status.from_call(error)
        for detail in (status or status_pb2.Status()).details:
            refusal._take(detail)
        return refusal

    def _take(self, detail: Any) -> None:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            assert info.domain == "specserve"
            self.reason, self.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            self.fields = {violation.field: violation.description for violation in bad.field_violations}
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            self.retry = True


@asynccontextmanager
async def serving(load: Callable[[], Any], wait_ready: bool = True) -> AsyncIterator[Client]:
    thread = EngineThread(load)
    door = GrpcDoor(thread)
    port = await door.start()
    thread.start()
    try:
        if wait_ready:
            await asyncio.wrap_future(thread.ready)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, thread, door, port)
    finally:
        await door.stop(0)
        await asyncio.to_thread(thread.stop)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does; fails, rather than hangs, when it never does."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.005)


def text_request(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)
