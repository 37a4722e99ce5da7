"""Whether a grammar is safe to compile, found out where it can do no harm.

The child compiles it and follows it along a few walks, under limits on CPU time, memory and stack. A grammar that
kills the child is refused, and the next one gets a new child.
"""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specserve.errors import EngineFault
from specserve.grammar.source import Vocabulary, invalid, new_matcher, why

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# a child that makes no progress at all, e.g. on a machine that starves it
MAX_WAIT_SECONDS = 60.0
MAX_CHILD_BYTES = 1 << 30
# smaller than any thread that later walks the grammar has, so what does not overflow there does not here
CHILD_STACK_BYTES = 4 << 20
# a token and the mask behind it on the way through the trial, twice, or twice as much once; ordinary ones take 0.02 to
# 0.6 ms, `((a{1000}){1000}){1000}` 400
MAX_ROW_SECONDS = 0.02
# compiling alone, which an answer may have to repeat; 1,000 properties take 0.2 s
MAX_COMPILE_SECONDS = 0.5
# along each walk: most ambiguity shows in 50 tokens
WALK_TOKENS = 256
# all of a walk; ordinary ones take 0.02 to 0.15 s
WALK_SECONDS = 1.0
# which of the allowed ids a walk takes: scattered ones, the first (single bytes, mostly), the last (long tokens)
WALKS: tuple[Callable[[int, int], int], ...] = (
    lambda turn, count: (turn * 7919) % count,
    lambda turn, count: 0,
    lambda turn, count: count - 1,
)


def _fault(matcher: LLMatcher, tokenizer: LLTokenizer, eos: frozenset[int]) -> str | None:
    """Follow a grammar along some walks and back. Why it is refused, or None."""
    if matcher.is_error():
        return why(matcher)
    first = matcher.compute_bitmask()
    if matcher.is_error():
        return "matches no text at all" if "NoExtension" in why(matcher) else why(matcher)
    for pick in WALKS:
        walker = matcher.deep_copy()
        refused, steps = _walk(walker, tokenizer, eos, pick)
        if refused is not None:
            return refused
        if walker.is_error():
            continue  # a dead end some tokens in is this answer's trouble, not the grammar's
        if not walker.rollback(steps) or walker.compute_bitmask() != first:
            return why(walker) or "cannot be rolled back"
    return None


def _walk(
    matcher: LLMatcher, tokenizer: LLTokenizer, eos: frozenset[int], pick: Callable[[int, int], int]
) -> tuple[str | None, int]:
    """Follow allowed tokens. Why the grammar is refused, or None; and how many were consumed."""
    total, late = 0.0, 0
    mask = matcher.compute_bitmask()
    for turn in range(WALK_TOKENS):
        allowed = np.flatnonzero(_bits(mask))
        ids = allowed[~np.isin(allowed, list(eos))]
        if not len(ids) and len(allowed) and not matcher.is_accepting():
            token = tokenizer.decode_str(allowed[:1].tolist())
            return f"wants {token!r} {turn} tokens into an answer, which is a special token that ends it", turn
        if not len(ids):
            return None, turn
        began = time.process_time()
        good = matcher.try_consume_tokens([int(ids[pick(turn, len(ids))])]) == 1
        mask = matcher.compute_bitmask() if good else mask
        seconds = time.process_time() - began
        total += seconds
        late += int(seconds / MAX_ROW_SECONDS)
        if late > 1:
            return f"takes {1e3 * seconds:.0f} ms a token to follow; allowed: {1e3 * MAX_ROW_SECONDS:.0f} ms", turn
        if total > WALK_SECONDS:
            return f"takes more than {WALK_SECONDS} s for {turn + 1} tokens to follow", turn
        if matcher.is_error() or not good:
            return _too_costly(matcher, turn), turn
    return None, WALK_TOKENS


def _too_costly(matcher: LLMatcher, turn: int) -> str | None:
    """Whether it was a limit on the cost of a step that ended a walk; llguidance tells only in words."""
    text = why(matcher)
    if any(words in text.lower() for words in ("too many", "max is", "fuel")):
        return f"costs too much to follow, {turn} tokens into an answer: {text}"
    return None


def _bits(mask: bytes) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")


def _memory(field: int) -> int:
    """Bytes of this process, 0 where the system does not say; field 0 = address space, 1 = resident."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


def _trim() -> None:
    """Give freed memory back, so that what the next grammar takes can be seen to grow."""
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _serve_trials(cpu_seconds: int) -> None:
    """The child: a vocabulary on the first line of stdin, then a grammar a line; a verdict a line on stdout."""
    vocabulary = Vocabulary(**json.loads(sys.stdin.readline()))
    try:
        tokenizer = vocabulary.load()
    except Exception as error:
        print(json.dumps({"tokenizer": str(error)}), flush=True)
        return
    print("{}", flush=True)
    eos = frozenset(vocabulary.eos_token_ids)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_memory(0) + MAX_CHILD_BYTES,) * 2)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        _trim()
        before = _memory(1)
        began = time.process_time()
        matcher = new_matcher(tokenizer, json.loads(line))
        seconds = time.process_time() - began
        refused = _fault(matcher, tokenizer, eos)
        if refused is None and seconds > MAX_COMPILE_SECONDS:
            refused = f"takes {seconds:.1f} s to compile; allowed: {MAX_COMPILE_SECONDS} s"
        print(json.dumps({"refused": refused, "grown": _memory(1) - before}), flush=True)
        del matcher


class Trial:
    """The child, started when first needed and again after it died. Used by one thread."""

    def __init__(self, vocabulary: Vocabulary, cpu_seconds: int) -> None:
        self._vocabulary = vocabulary
        self._cpu_seconds = cpu_seconds
        self._child: subprocess.Popen[str] | None = None

    def run(self, source: str) -> int:
        """Bytes that the grammar takes.

        Raises:
            GrammarInvalid: it is refused, or the child did not survive it.
        """
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._start()
        reply = self._ask(json.dumps(source))
        if reply is None:
            raise invalid(
                f"cannot be compiled within {self._cpu_seconds} s of CPU time, {MAX_CHILD_BYTES >> 20} MiB and"
                f" {CHILD_STACK_BYTES >> 20} MiB of stack; make it smaller or less nested"
            )
        if reply["refused"] is not None:
            raise invalid(f"cannot be used: {reply['refused']}")
        grown: int = reply["grown"]
        return grown

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "specserve.grammar", str(self._cpu_seconds)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, encoding="utf-8")
        reply = self._ask(json.dumps(asdict(self._vocabulary)))
        if reply is None:
            raise EngineFault("the process that tries grammars did not start")
        if "tokenizer" in reply:
            raise invalid(f"cannot be used with this model's tokenizer: {reply['tokenizer']}")

    def _ask(self, line: str) -> dict[str, Any] | None:
        """The child's answer; None if it died or took too long, after which it is gone."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        watch = threading.Timer(MAX_WAIT_SECONDS, child.kill)
        watch.daemon = True
        watch.start()
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = ""
        finally:
            watch.cancel()
        if not answer:
            self.close()
            return None
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            for stream in (child.stdin, child.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:
                    pass
            child.wait()


def main() -> None:
    threading.stack_size(CHILD_STACK_BYTES)
    worker = threading.Thread(target=_serve_trials, args=(int(sys.argv[1]),))
    worker.start()
    worker.join()
