"""Grammars compiled once, off the engine's thread, and kept while they are used and fit."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from specserve.constraint import GrammarSpec, grammar_violations
from specserve.errors import (
    EngineFault,
    FieldViolation,
    GrammarInvalid,
    InvalidRequest,
    Overloaded,
    SpecserveError,
    Unavailable,
)
from specserve.grammar.source import Vocabulary, invalid, source_of, special_choice, special_texts
from specserve.grammar.state import Grammar
from specserve.grammar.trial import Trial

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DEFAULT_CACHE_BYTES = 128 << 20
DEFAULT_CPU_SECONDS = 3
MAX_PENDING = 64  # grammars that wait for the one thread, each at most its trial's CPU time
MIN_CHARGE = 1 << 15  # bytes a cached grammar is charged at least


class Compilation:
    """A grammar that is being compiled, or was."""

    def __init__(self, future: Future[tuple[Grammar, int]]) -> None:
        self._future = future

    def try_get(self) -> Grammar | None:
        """The grammar, or None while it is being compiled.

        Raises:
            GrammarInvalid: it cannot be compiled; every time it is asked for.
            Unavailable: the compiler was closed before it was.
        """
        return self.get() if self._future.done() else None

    def get(self, timeout: float | None = None) -> Grammar:
        """Wait for the grammar, at most `timeout` seconds (then TimeoutError). Raises as `try_get`."""
        try:
            error = self._future.exception(timeout)
        except CancelledError:
            raise Unavailable("the server ended before the grammar was compiled") from None
        if isinstance(error, SpecserveError):
            # one exception object raised in two places would grow its traceback for ever
            raise type(error)(error.violations) if isinstance(error, GrammarInvalid) else error
        return self._future.result()[0]

    async def wait(self) -> Grammar:
        """Wait for the grammar without a thread; who stops waiting does not stop the others. Raises as `try_get`."""
        if not self._future.done():
            inner = asyncio.wrap_future(self._future)
            inner.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen, if nobody waits
            await asyncio.wait([inner])  # cancelled, it leaves `inner` and so the shared future alone
        return self.get()

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def charge(self) -> int:
        """Bytes that the cache counts for it, its text not included."""
        if not self._future.done() or self._future.exception() is not None:
            return 0
        return self._future.result()[1]


class GrammarCompiler:
    """Compiles grammars on a thread of its own, the same one once. Safe to call from any thread.

    Args:
        tokenizer_json: text of the model's tokenizer.json.
        vocab_size: number of logits; ids that the tokenizer does not know are never allowed.
        eos_token_ids: all ids that end an answer.
        cache_bytes: what finished compilations may take together, failed ones included.
        cpu_seconds: CPU time that one grammar may take in the trial.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        cpu_seconds: int = DEFAULT_CPU_SECONDS,
    ) -> None:
        self._vocabulary = Vocabulary(
            tokenizer_json=tokenizer_json, vocab_size=vocab_size, eos_token_ids=tuple(eos_token_ids)
        )
        self._cache_bytes = cache_bytes
        self._special: tuple[str, ...] | None = None
        self._pending = 0
        self._trial = Trial(self._vocabulary, cpu_seconds)
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._lock = threading.RLock()  # a grammar that fails at once settles under `compile`'s own lock
        # one thread: the trial is one process, and grammars should not take the cores from the model
        self._pool = ThreadPoolExecutor(1, "specserve-grammar")
        self._end = weakref.finalize(self, _shut, self._pool, self._trial)

    def compile(self, spec: GrammarSpec) -> Compilation:
        """Start compiling, or find what was compiled before; returns at once.

        Raises:
            InvalidRequest: the grammar is over a limit, or llguidance is not installed.
            Overloaded: too many others wait to be compiled.
        """
        found = grammar_violations(spec)
        if found:
            raise InvalidRequest([FieldViolation(name, text) for name, text in found])
        if importlib.util.find_spec("llguidance") is None:
            raise InvalidRequest(
                [FieldViolation("grammar", "this server has no llguidance; pip install 'specserve[grammar]'")]
            )
        with self._lock:
            compilation = self._cache.get(spec)
            if compilation is None:
                compilation = self._cache[spec] = Compilation(self._submit(spec))
            self._cache.move_to_end(spec)
            self._evict()
        return compilation

    @property
    def cached_bytes(self) -> int:
        """What the compilations that are kept count for."""
        with self._lock:
            return sum(map(_charge, self._cache.items()))

    def close(self) -> None:
        """End the thread and the child. Nothing can be compiled afterwards."""
        self._end()

    def _submit(self, spec: GrammarSpec) -> Future[tuple[Grammar, int]]:
        """Queue a grammar; the lock is held."""
        if self._pending >= MAX_PENDING:
            raise Overloaded(
                f"{self._pending} grammars wait to be compiled, as many as may; try again later",
                metadata={"pending_grammars": str(self._pending), "max_pending_grammars": str(MAX_PENDING)},
            )
        future = self._pool.submit(self._compile, spec)
        self._pending += 1
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: Future[tuple[Grammar, int]]) -> None:
        with self._lock:
            self._pending -= 1

    def _compile(self, spec: GrammarSpec) -> tuple[Grammar, int]:
        try:
            source = source_of(spec)
        except ValueError as error:
            raise invalid(f"cannot be used: {error}") from None
        if self._special is None:
            self._special = special_texts(self._vocabulary.tokenizer_json)
        found = special_choice(spec, self._special)
        if found is not None:
            raise invalid(found)
        try:
            grown = self._trial.run(source)
        except EngineFault:
            with self._lock:  # not the grammar's fault: the next request tries again
                self._cache.pop(spec, None)
            raise
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.load()
        grammar = Grammar(self._tokenizer, source, self._vocabulary.vocab_size, self._vocabulary.eos_token_ids)
        return grammar, max(grown, MIN_CHARGE)

    def _evict(self) -> None:
        """Drop the least recently used of what is finished, down to the bytes allowed."""
        total = sum(map(_charge, self._cache.items()))
        for spec, compilation in list(self._cache.items()):
            if total <= self._cache_bytes:
                return
            if compilation.done:
                total -= _charge((spec, compilation))
                del self._cache[spec]


def _charge(item: tuple[GrammarSpec, Compilation]) -> int:
    spec, compilation = item
    return 1024 + 2 * spec.num_bytes + compilation.charge


def _shut(pool: ThreadPoolExecutor, trial: Trial) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    trial.close()
