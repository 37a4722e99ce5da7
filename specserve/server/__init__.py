"""Doors: each translates one wire contract into `Request` and the engine's events back, and decides nothing.

A door knows the engine through the protocols below only, so that it can be tested against a fake and does not
care whether the engine runs on a thread (`worker.py`) or, later, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from specserve.config import EngineConfig, ModelLimits
from specserve.events import Event
from specserve.metrics import EngineMetrics
from specserve.request import Request


class ServedEngine(Protocol):
    """What a door may read of the engine from its own thread: only `metrics` changes, and grows. `clock()` is in
    seconds."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def clock(self) -> Callable[[], float]: ...


class TextTokenizer(Protocol):
    """What a door needs of the tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def encode_prediction(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]: ...


class Served(Protocol):
    """A loaded engine with all that a door tells about it."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def startup_lines(self) -> Sequence[str]: ...

    @property
    def environment(self) -> str: ...


class AsyncEngine(Protocol):
    """The engine as a door sees it, from any event loop."""

    @property
    def ready(self) -> Future[Any]:
        """Resolves to `Served` when the model is loaded, or to the error that kept it from loading."""
        ...

    @property
    def ended(self) -> Future[None]:
        """Resolves when the engine takes no more requests: stopped, or with the fault that ended it."""
        ...

    def served(self) -> Served:
        """What is served now.

        Raises:
            Unavailable: the engine is loading, stopped or broken.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request until its last; closing or cancelling the generator aborts the request.

        Raises:
            SpecserveError: the request was refused or failed.
        """
        ...


async def done(future: Future[Any]) -> None:
    """Wait on this loop until another thread settled `future`; neither its error nor a cancel passes through."""
    loop, settled = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settled.set)

    future.add_done_callback(wake)
    await settled.wait()
