"""Grammars at work: compiled once, off the engine's thread, and then followed token by token by llguidance.

Anybody may send a grammar, and a short one can cost minutes, gigabytes or the whole process (a Lark file of chained
rules overflows the stack). So each is tried first in a child process with limits on CPU time, memory and stack; only
what survives is compiled here. A state keeps two matchers. One consumes committed tokens and nothing else. The other
scouts draft trees and is thrown away when in doubt, so nothing that a rejected draft did can stay.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specserve.constraint import GrammarSpec, grammar_violations
from specserve.errors import EngineFault, FieldViolation, GrammarInvalid, GrammarStuck, InvalidRequest, SpecserveError
from specserve.proposal import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DEFAULT_CACHE_BYTES = 64 << 20
DEFAULT_CPU_SECONDS = 3
# a child that makes no progress at all, e.g. on a machine that starves it
MAX_WAIT_SECONDS = 60.0
MAX_CHILD_BYTES = 1 << 30
# smaller than any thread that later walks the grammar has, so what does not overflow there does not here
CHILD_STACK_BYTES = 4 << 20
# a mask on the way through the trial; ordinary ones take 0.02 to 0.6 ms, `((a{1000}){1000}){1000}` 400
MAX_MASK_SECONDS = 0.05
TRIAL_STEPS = 16
MAX_MESSAGE_LEN = 500
MIN_CHARGE = 1 << 15  # bytes a cached grammar is charged at least
# 1 to 2 kB each; a string of n bytes visits n states, those that its masks look ahead to included
MAX_LEXER_STATES = 20_000
# A tenth of llguidance's default: eager work on large lexemes stops earlier, 1,024 choices of 1,000 characters take
# 70 ms to the first mask instead of 1,400.
INITIAL_LEXER_FUEL = 100_000
# As json.dumps writes: free whitespace lets a small model pad an object for ever, and a fixed text is forced text.
JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Packed = NDArray[np.uint32]
"""Allowed ids as bits, lowest first: id i is bit i % 32 of word i // 32; [rows, ceil(vocab / 32)]."""


def allowed_ids(masks: Packed, vocab_size: int) -> NDArray[np.bool_]:
    """Packed masks [..., words] as booleans [..., vocab]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


# ---- what both sides of the trial do


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The model's ids: a tokenizer.json as text, the number of logits, and every id that ends an answer."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """Takes about a second.

        Raises:
            ValueError: llguidance cannot read this tokenizer.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids) or None)


def _source(spec: GrammarSpec) -> str:
    """The grammar as llguidance reads it; nothing is checked here."""
    from llguidance import LLMatcher

    if isinstance(spec.value, tuple):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_lark_text, spec.value)))
    match spec.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.value, defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_FORMAT)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(spec.value)
        case "lark":
            return LLMatcher.grammar_from_lark(spec.value)
    raise ValueError(f"no such kind of grammar: {spec.kind!r}")


def _lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        verbose_errors=False, max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=INITIAL_LEXER_FUEL
    )
    return LLMatcher(tokenizer, source, log_level=0, limits=limits)


def _why(matcher: LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + " …"


# ---- the trial


def _try(tokenizer: LLTokenizer, source: str, eos: frozenset[int]) -> str | None:
    """Compile a grammar and follow it a few steps and back. Why it is refused, or None."""
    matcher = _matcher(tokenizer, source)
    if matcher.is_error():
        return _why(matcher)
    first = matcher.compute_bitmask()
    if matcher.is_error():
        return "matches no text at all" if "NoExtension" in _why(matcher) else _why(matcher)
    steps, mask = 0, first
    for turn in range(TRIAL_STEPS):
        ids = [i for i in np.flatnonzero(_bits(mask)).tolist() if i not in eos]
        if not ids or matcher.try_consume_tokens([ids[(turn * 7919) % len(ids)]]) != 1:
            break
        steps += 1
        began = time.process_time()
        mask = matcher.compute_bitmask()
        seconds = time.process_time() - began
        if seconds > MAX_MASK_SECONDS:
            return f"takes {1e3 * seconds:.0f} ms a token to follow; allowed: {1e3 * MAX_MASK_SECONDS:.0f} ms"
        if matcher.is_error():
            return None  # a dead end some tokens in is this answer's trouble, not the grammar's
    if not matcher.rollback(steps) or matcher.compute_bitmask() != first:
        return _why(matcher) or "cannot be rolled back"
    return None


def _bits(mask: bytes) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")


def _pages(field: int) -> int:
    """Bytes of this process: field 0 = address space, 1 = in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


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
        resource.setrlimit(resource.RLIMIT_AS, (_pages(0) + MAX_CHILD_BYTES,) * 2)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        before = used.ru_maxrss
        why = _try(tokenizer, json.loads(line), eos)
        # ru_maxrss is in KiB on Linux
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        print(json.dumps({"refused": why, "grown": grown}), flush=True)


class _Trial:
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
            raise _invalid(
                f"cannot be compiled within {self._cpu_seconds} s of CPU time, {MAX_CHILD_BYTES >> 20} MiB and"
                f" {CHILD_STACK_BYTES >> 20} MiB of stack; make it smaller or less nested"
            )
        if reply["refused"] is not None:
            raise _invalid(f"cannot be used: {reply['refused']}")
        grown: int = reply["grown"]
        return grown

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "specserve.grammar", str(self._cpu_seconds)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, encoding="utf-8")
        fields = ("tokenizer_json", "vocab_size", "eos_token_ids")
        reply = self._ask(json.dumps({name: getattr(self._vocabulary, name) for name in fields}))
        if reply is None:
            raise EngineFault("the process that tries grammars did not start")
        if "tokenizer" in reply:
            raise _invalid(f"cannot be used with this model's tokenizer: {reply['tokenizer']}")

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


def _invalid(description: str) -> GrammarInvalid:
    return GrammarInvalid([FieldViolation("grammar", description)])


# ---- compiling


class Grammar:
    """A compiled grammar, shared by all answers that follow it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = eos_token_ids

    def start(self) -> GrammarState:
        """The state of an answer without a token."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos)


class Compilation:
    """A grammar that is being compiled, or was."""

    def __init__(self, future: Future[tuple[Grammar, int]]) -> None:
        self._future = future

    def try_get(self) -> Grammar | None:
        """The grammar, or None while it is being compiled.

        Raises:
            GrammarInvalid: it cannot be compiled; every time it is asked for.
        """
        return self.get() if self._future.done() else None

    def get(self, timeout: float | None = None) -> Grammar:
        """Wait for the grammar, at most `timeout` seconds (then TimeoutError). Raises as `try_get`."""
        error = self._future.exception(timeout)
        if isinstance(error, SpecserveError):
            # one exception object raised in two places would grow its traceback for ever
            raise type(error)(error.violations) if isinstance(error, GrammarInvalid) else error
        return self._future.result()[0]

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
        self._trial = _Trial(self._vocabulary, cpu_seconds)
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._lock = threading.Lock()
        # one thread: the trial is one process, and grammars should not take the cores from the model
        self._pool = ThreadPoolExecutor(1, "specserve-grammar")
        self._end = weakref.finalize(self, _shut, self._pool, self._trial)

    def compile(self, spec: GrammarSpec) -> Compilation:
        """Start compiling, or find what was compiled before; returns at once.

        Raises:
            InvalidRequest: the grammar is over a limit, or llguidance is not installed.
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
                compilation = self._cache[spec] = Compilation(self._pool.submit(self._compile, spec))
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

    def _compile(self, spec: GrammarSpec) -> tuple[Grammar, int]:
        source = _source(spec)
        try:
            grown = self._trial.run(source)
        except EngineFault:
            with self._lock:  # not the grammar's fault: the next request tries again
                self._cache.pop(spec, None)
            raise
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.load()
        matcher = _matcher(self._tokenizer, source)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(f"cannot be used: {_why(matcher)}")
        grammar = Grammar(matcher, self._vocabulary.vocab_size, self._vocabulary.eos_token_ids)
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


def _shut(pool: ThreadPoolExecutor, trial: _Trial) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    trial.close()


# ---- following


class GrammarState:
    """Where one answer is in its grammar. Not thread-safe; forks are independent."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._committed = matcher
        self._scout = matcher.deep_copy()
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._ended = False

    @property
    def num_words(self) -> int:
        return -(-self._vocab_size // 32)

    @property
    def finished(self) -> bool:
        """Whether nothing but the end of the answer may follow."""
        return self._ended or (self._committed.is_stopped() and self._committed.is_accepting())

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        twin = GrammarState(self._committed.deep_copy(), self._vocab_size, self._eos)
        twin._ended = self._ended
        return twin

    def accept(self, token_ids: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarStuck: one of them is not allowed; those before it are committed.
        """
        for token_id in token_ids:
            if token_id in self._eos:
                if not (self._ended or self._committed.is_accepting()):
                    raise GrammarStuck("the answer ended before its grammar did")
                self._ended = True
            elif self._ended or not self._consumed(self._committed, token_id):
                raise GrammarStuck(f"the answer's grammar does not allow token {token_id} here")
            elif not self._consumed(self._scout, token_id):
                self._scout = self._committed.deep_copy()

    def masks(self, tree: DraftTree) -> Packed:
        """Allowed ids at the root's row and at each node's row, [1 + nodes, words].

        A row of zeros: the node is not allowed where it stands, or nothing may follow it. All EOS ids are allowed
        wherever the grammar is complete, and nowhere else.

        Raises:
            GrammarStuck: nothing may follow what is committed.
        """
        masks = np.zeros((1 + len(tree), self.num_words), np.uint32)
        self._fill(masks[0])
        if not masks[0].any():  # perhaps only the scout's trouble: states that earlier drafts left in its lexer
            self._scout = self._committed.deep_copy()
            self._fill(masks[0])
        if not masks[0].any():
            raise GrammarStuck(f"the answer's grammar allows no token here: {_why(self._scout) or 'a dead end'}")
        self._walk(tree, masks)
        return masks

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without nodes that the grammar does not allow, and without what stands below them."""
        valid = self._walk(tree, None)
        if all(valid):
            return tree
        kept: dict[int, int] = {-1: -1}
        for node in (node for node, good in enumerate(valid) if good):
            kept[node] = len(kept) - 1
        nodes = [node for node in kept if node >= 0]
        return DraftTree(
            tuple(tree.token_ids[node] for node in nodes),
            tuple(kept[tree.parents[node]] for node in nodes),
            tuple(tree.drafters[node] for node in nodes),
        )

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that the grammar all but forces next: the usual spelling of the only text possible.

        Guesses, for verification to judge: the target may split the same text into other tokens.
        """
        if self._ended or limit < 1:
            return []
        scout = self._scout
        tokens = scout.compute_ff_tokens()[:limit]
        steps = scout.try_consume_tokens(tokens) if tokens else 0
        complete = scout.is_stopped() and scout.is_accepting() and bool(self._eos)
        tokens = tokens[:steps]
        self._rewind([], steps)
        return [*tokens, self._eos[0]] if complete and len(tokens) < limit else tokens

    def _consumed(self, matcher: LLMatcher, token_id: int) -> bool:
        """Consume a token if it is allowed; an id that is none, -1 of a padded row say, never reaches llguidance."""
        return 0 <= token_id < self._vocab_size and matcher.try_consume_tokens([token_id]) == 1

    def _fill(self, row: Packed) -> None:
        """The scout's mask; zeros if it has none. llguidance does not undo an EOS, so it is never given one."""
        if self._ended:
            self._set_eos(row, True)
            return
        accepting = self._scout.is_accepting()
        if not (accepting and self._scout.is_stopped()):
            try:
                self._scout.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            except ValueError:
                row[:] = 0
            if self._scout.is_error():
                row[:] = 0
                return
        self._set_eos(row, accepting)

    def _set_eos(self, row: Packed, allowed: bool) -> None:
        for token_id in self._eos:
            word, bit = token_id // 32, np.uint32(1 << token_id % 32)
            row[word] = row[word] | bit if allowed else row[word] & ~bit

    def _walk(self, tree: DraftTree, masks: Packed | None) -> list[bool]:
        """Visit the tree depth first with the scout and bring it back; which nodes are allowed where they stand."""
        valid = [False] * len(tree)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []  # nodes consumed, from the root down
        todo = children.get(-1, [])[::-1]
        while todo:
            node = todo.pop()
            above = path.index(tree.parents[node]) + 1 if tree.parents[node] >= 0 else 0
            if above < len(path):
                self._rewind([tree.token_ids[i] for i in path[:above]], len(path) - above)
                del path[above:]
            if tree.token_ids[node] in self._eos or self._ended:
                valid[node] = tree.token_ids[node] in self._eos and (self._ended or self._scout.is_accepting())
                if valid[node] and masks is not None:
                    self._set_eos(masks[1 + node], True)
                continue
            if not self._consumed(self._scout, tree.token_ids[node]):
                continue
            path.append(node)
            valid[node] = True
            if masks is not None:
                self._fill(masks[1 + node])
            todo += children.get(node, [])[::-1]
        self._rewind([], len(path))
        return valid

    def _rewind(self, kept: Sequence[int], steps: int) -> None:
        """Take the scout back `steps` tokens; if it cannot, a new one goes `kept` tokens down from the root."""
        if self._scout.is_error() or (steps and not self._scout.rollback(steps)):
            self._scout = self._committed.deep_copy()
            self._scout.try_consume_tokens(list(kept))


def _main() -> None:
    threading.stack_size(CHILD_STACK_BYTES)
    worker = threading.Thread(target=_serve_trials, args=(int(sys.argv[1]),))
    worker.start()
    worker.join()


if __name__ == "__main__":
    _main()
