"""The engine on a thread of its own, seen from any event loop.

One thread owns the engine: it carries out what the doors queued (submit, abort, stop), runs a step, and posts the
step's events to each reader's loop in one call per loop. While nothing is to be done it sleeps on the queue. Every
request that was accepted gets an answer: its events, the error of its own, or the fault that ended the thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from specserve.errors import Cancelled, EngineFault, SpecserveError, Unavailable
from specserve.events import Delta, Event, Failed, Finished
from specserve.request import Request

if TYPE_CHECKING:
    from specserve.build import Built
    from specserve.engine import Engine
    from specserve.grammar import Grammar

logger = logging.getLogger(__name__)


class _Stream:
    """Events of one request on their way to its reader.

    `open_choices` belongs to the engine's thread, the rest to the reader's loop. What the reader did not take yet
    is held with all deltas of a choice merged, so that a slow reader costs at most one answer's tokens.
    """

    def __init__(self, request: Request, grammar: Grammar | None = None) -> None:
        self.request = request
        self.grammar = grammar
        self.loop = asyncio.get_running_loop()
        self.open_choices = request.params.n
        self._pending: list[Event] = []
        self._last_delta: dict[int, int] = {}
        self._wake = asyncio.Event()

    def deliver(self, event: Event) -> None:
        if isinstance(event, Delta):
            at = self._last_delta.setdefault(event.index, len(self._pending))
            if at < len(self._pending):
                held = self._pending[at]
                assert isinstance(held, Delta)
                self._pending[at] = replace(event, tokens=held.tokens + event.tokens)
                return
        self._pending.append(event)
        self._wake.set()

    async def take(self) -> list[Event]:
        """All events since the last call; waits for one."""
        await self._wake.wait()
        self._wake.clear()
        events, self._pending = self._pending, []
        self._last_delta.clear()
        return events


_Command = _Stream | str | None
"""Submit this stream's request, abort the request of this id, or stop."""


class EngineThread:
    """Runs `load()` and then the engine that it returned on one thread; doors see it as an `AsyncEngine`."""

    def __init__(self, load: Callable[[], Built]) -> None:
        self.ready: Future[Built] = Future()
        self.ended: Future[None] = Future()
        self._load = load
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="specserve-engine", daemon=True)

    def start(self) -> None:
        """Begin to load; `ready` tells when that is done."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, and wait for that; requests in flight fail with Unavailable."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def served(self) -> Built:
        """What is served now.

        Raises:
            Unavailable: the engine is loading, stopped or broken.
        """
        if self.ended.done():
            raise self._unavailable(self.ended.exception())
        if not self.ready.done():
            raise Unavailable("the model is still loading; try again shortly", metadata={"state": "loading"})
        return self.ready.result()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of one request until its last; closing or cancelling the generator aborts the request.

        Raises:
            SpecserveError: the request was refused, failed, was aborted, or the engine is not there.
        """
        stream = _Stream(request, await self._grammar(request))
        self._post(stream)
        open_choices = request.params.n
        try:
            while open_choices:
                for event in await stream.take():
                    if isinstance(event, Failed):
                        open_choices = 0
                        raise event.error
                    open_choices -= isinstance(event, Finished)
                    yield event
        finally:
            if open_choices:
                self.abort(request.request_id)

    async def _grammar(self, request: Request) -> Grammar | None:
        """What the request's grammar compiles to; the engine never waits for it."""
        served, spec = self.served(), request.params.grammar
        return None if spec is None else await served.grammars.compile(spec).wait()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; it fails with Cancelled. Unknown and ended requests are ignored."""
        with self._gate:
            if not self._closed:
                self._inbox.put(request_id)

    def _post(self, stream: _Stream) -> None:
        with self._gate:
            if not self._closed:
                self._inbox.put(stream)
                return
        raise self._unavailable(None)

    def _run(self) -> None:
        fault: BaseException | None = None
        try:
            served = self._load()
            self.ready.set_result(served)
            self._serve(served.engine)
        except BaseException as error:
            fault = error
            if not self.ready.done():
                self.ready.set_exception(error)
            else:
                logger.exception("the engine stopped")
        self._close(fault)

    def _close(self, fault: BaseException | None) -> None:
        """Answer everybody who is waiting or still in the queue, then say that it is over."""
        with self._gate:
            self._closed = True
        waiting = list(self._streams.values())
        while not self._inbox.empty():
            command = self._inbox.get()
            waiting += [command] if isinstance(command, _Stream) else []
        self._streams.clear()
        for stream in waiting:
            self._post_events([(stream, _failed(stream, self._unavailable(fault)))])
        if fault is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(fault)

    @staticmethod
    def _unavailable(fault: BaseException | None) -> Unavailable:
        if fault is None:
            return Unavailable("the engine has stopped", metadata={"state": "stopped"})
        return Unavailable(f"the engine stopped after {_told(fault)}", metadata={"state": "broken"})

    def _serve(self, engine: Engine) -> None:
        while self._obey(engine):
            try:
                events = engine.step()
            except Exception as error:
                self._step_failed(engine, error)
            else:
                self._publish(events)

    def _obey(self, engine: Engine) -> bool:
        """Carry out what is queued, sleeping while there is no work; False = stop."""
        while True:
            try:
                command = self._inbox.get(block=not engine.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, str):
                self._abort(engine, command)
            else:
                self._submit(engine, command)

    def _submit(self, engine: Engine, stream: _Stream) -> None:
        try:
            engine.submit(stream.request, stream.grammar)
        except SpecserveError as error:
            self._post_events([(stream, _failed(stream, error))])
        except Exception as error:
            logger.exception("submit failed")
            fault = EngineFault(f"the engine could not take the request: {_told(error)}")
            self._post_events([(stream, _failed(stream, fault))])
        else:
            self._streams[stream.request.request_id] = stream

    def _abort(self, engine: Engine, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._post_events([(stream, _failed(stream, Cancelled("the request was aborted")))])
            engine.abort(request_id)

    def _step_failed(self, engine: Engine, error: Exception) -> None:
        """All requests in flight fail; the engine goes on, unless it fails with nobody left to serve."""
        if not self._streams:
            raise error
        logger.error("a step failed; %d requests end with it", len(self._streams), exc_info=error)
        failed, self._streams = list(self._streams.values()), {}
        fault = EngineFault(f"the step that served this request failed: {_told(error)}")
        self._post_events((stream, _failed(stream, fault)) for stream in failed)
        for stream in failed:
            engine.abort(stream.request.request_id)

    def _publish(self, events: Iterable[Event]) -> None:
        addressed = []
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:  # aborted: its reader has its answer
                continue
            addressed.append((stream, event))
            stream.open_choices -= isinstance(event, Finished)
            if stream.open_choices == 0 or isinstance(event, Failed):
                del self._streams[event.request_id]
        self._post_events(addressed)

    def _post_events(self, addressed: Iterable[tuple[_Stream, Event]]) -> None:
        """One wake-up per loop, however many events."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event]]] = {}
        for stream, event in addressed:
            batches.setdefault(stream.loop, []).append((stream, event))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed, and with it all its readers
                for stream, _ in batch:
                    self._inbox.put(stream.request.request_id)


def _deliver(batch: list[tuple[_Stream, Event]]) -> None:
    for stream, event in batch:
        stream.deliver(event)


def _failed(stream: _Stream, error: Exception) -> Failed:
    return Failed(request_id=stream.request.request_id, error=error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
