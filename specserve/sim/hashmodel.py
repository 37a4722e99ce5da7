"""A target without weights: the next token is a hash of everything before it, read back through the page tables.

A slot of the pool holds its token and a state, which is a hash of the token and of the states of all slots that its
row saw: like K and V of a real model it depends on its whole prefix. So a wrong slot, a stale page, a lost copy, a
missed compaction or a prefix hit of somebody else's prefix changes the answer. `answer` knows it beforehand.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

import torch

from specserve.batch import Span, StepBatch
from specserve.pages import Move, PagePool
from specserve.request import Request
from specserve.runner import ForwardResult
from specserve.sim.script import EOS, POISON, SOFT

STATE_BITS = 0x7FFFFFFF
GONE, NOT_FINITE = 0x80000000, 0x80000001  # states of a slot on the free list, and of a row that is not finite
NUM_DRAWABLE = POISON  # every id but POISON, a prime number of them

# logits of a row whose favourite is id f: it, then f + 5, f + 10, … in equal gaps. Sharp: no noise turns them around.
_RANKS = [[(token - first) * 14 % NUM_DRAWABLE for token in range(NUM_DRAWABLE)] for first in range(NUM_DRAWABLE)]
_SHARP_LOGITS = torch.tensor([[1e4 - 400.0 * rank for rank in ranks] + [-1e4] for ranks in _RANKS])
_SOFT_LOGITS = torch.tensor([[-1.0 * rank for rank in ranks] + [-1e4] for ranks in _RANKS])
_LOGITS = torch.cat([_SHARP_LOGITS, _SOFT_LOGITS])


class Violation(Exception):
    """A law that did not hold."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.what = what
        self.step = 0


def extend(history: int, token: int) -> int:
    """The hash of all states up to and including this token's."""
    state = crc32(token.to_bytes(1, "little"), history) & STATE_BITS
    return crc32(state.to_bytes(4, "little"), history)


def favourite(history: int, token: int, key: bytes) -> int:
    """The likeliest id after `token`, the last of `history`: every second time a hash of everything.

    In between it follows from the last token alone, so that text repeats itself and prompt lookup finds something.
    """
    return crc32(key, history) % NUM_DRAWABLE if history & 1 else (7 * token + 3) % NUM_DRAWABLE


def key_of(temperature: float, seed: int, choice: int) -> bytes:
    """What the draws of a sharp sampled request depend on beside the text."""
    return b"" if temperature in (0.0, SOFT) else b"%d/%d" % (seed, choice)


def answer(request: Request, choice: int, room: int) -> tuple[list[int], str]:
    """What a greedy or sharp request must get, and why it ends; `room` tokens fit the context and the pool."""
    params = request.params
    stops = {EOS, *params.stop_token_ids}
    history = token = 0
    for token in request.prompt_token_ids:
        history = extend(history, token)
    tokens: list[int] = []
    while True:
        # the first token of all choices is drawn from the one row of the first
        key = key_of(params.temperature, params.seed or 0, choice if tokens else 0)
        token = favourite(history, token, key)
        while token in stops and len(tokens) < params.min_tokens:
            token = (token + 5) % NUM_DRAWABLE
        tokens.append(token)
        if token in stops or (f"<{token}>" in params.stop and len(tokens) >= params.min_tokens):
            return tokens, "stop"
        if len(tokens) == min(room, params.max_tokens or room):
            return tokens, "length"
        history = extend(history, token)


class _Sight:
    """What the rows of one sequence see in one step: its slots in order, and the hash of the first `length`."""

    def __init__(self, runner: HashRunner, pages: Sequence[int], length: int) -> None:
        size = runner.page_size
        self.slots = [page * size + i for page in pages for i in range(size)]
        self.length = length
        states = array("I", [runner.states[slot] for slot in self.slots[:length]])
        if GONE in states:
            raise Violation("sight", f"slot {states.index(GONE)} of a sequence is on the free list")
        self.finite = NOT_FINITE not in states
        self.history = crc32(states.tobytes())


class HashRunner:
    """A `specserve.runner.Runner` over two lists of slots. `breach` is what it found wrong first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.tokens = bytearray(num_pages * page_size)
        self.states = array("I", [GONE]) * (num_pages * page_size)
        self.breach: Violation | None = None
        self.raises = False
        self.strikes: dict[str, int] = {}  # request id: which of its rows is made non-finite
        self.struck: set[str] = set()  # whose pending rows were, in this step
        self.num_forwards = self.num_rows = self.num_good_forwards = self.num_good_rows = 0

    def forward(self, batch: StepBatch) -> ForwardResult:
        """Fill in all rows; the favourites of the drawing rows come out as logits."""
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        if self.raises:
            self.raises = False
            raise RuntimeError("a planted failure")
        try:
            histories, finite = self._fill(batch)
        except Violation as violation:
            self.breach = self.breach or violation
            raise
        self.num_good_forwards += 1
        self.num_good_rows += batch.num_rows
        ids = batch.ids.tolist()
        first: list[int] = []
        for row, (key, offset) in zip(batch.logit_rows.tolist(), self._keys(batch.spans), strict=True):
            first.append(offset + favourite(histories[row], ids[row], key))
        return ForwardResult(_LOGITS[first], finite)

    def _keys(self, spans: Iterable[Span]) -> list[tuple[bytes, int]]:
        """Per drawing row: what its draw depends on beside the text, and where its kind of logits begins."""
        keys = []
        for span in spans:
            if span.draws:
                temperature, sequence = span.sequence.request.params.temperature, span.sequence
                key = key_of(temperature, sequence.seed, sequence.choice)
                keys += [(key, NUM_DRAWABLE * (temperature == SOFT))] * (1 + len(span.tree))
        return keys

    def _fill(self, batch: StepBatch) -> tuple[list[int], list[bool]]:
        """Write tokens and states of all rows; returns what each row saw, as a hash, and whether it is finite."""
        slots = batch.slots.tolist()
        if len(set(slots)) != len(slots):
            raise Violation("slots", f"two rows write one slot: {slots}")
        struck = self._strike(batch.spans)
        seen = batch.attention
        columns = (seen.sequence, seen.prefix_len, seen.tail_slots, seen.tail_len, batch.ids, batch.positions)
        pages = seen.page_table.tolist()
        sights: dict[int, _Sight] = {}
        histories: list[int] = []
        finites: list[bool] = []
        rows = zip(slots, *(column.tolist() for column in columns), strict=True)
        for row, (slot, sequence, prefix_len, tail, tail_len, token, position) in enumerate(rows):
            num_past = prefix_len - (not tail_len)  # a pending row is the last of its own prefix
            sight = sights.get(sequence)
            if sight is None:
                sight = sights[sequence] = _Sight(self, pages[sequence], num_past)
            history, finite = self._past(sight, num_past, tail[: max(tail_len - 1, 0)])
            own = sight.slots[tail[tail_len - 1] if tail_len else num_past]
            if own != slot or position != num_past + max(tail_len - 1, 0):
                raise Violation("sight", f"row {row} writes slot {slot}, sees {own} as its own, position {position}")
            finite = finite and token != POISON and row not in struck
            state = crc32(token.to_bytes(1, "little"), history) & STATE_BITS
            self.tokens[slot] = token
            self.states[slot] = state if finite else NOT_FINITE
            histories.append(crc32(state.to_bytes(4, "little"), history))
            finites.append(finite)
        return histories, finites

    def _past(self, sight: _Sight, num_past: int, tail: Sequence[int]) -> tuple[int, bool]:
        """Hash and finiteness of the first `num_past` slots of a sequence, and of the nodes above a node."""
        if num_past < sight.length:
            raise Violation("sight", f"a row sees {num_past} slots, one before it saw {sight.length}")
        for slot in sight.slots[sight.length : num_past]:
            sight.history, sight.finite = self._see(slot, sight.history, sight.finite)
        sight.length = num_past
        history, finite = sight.history, sight.finite
        for index in tail:
            history, finite = self._see(sight.slots[index], history, finite)
        return history, finite

    def _see(self, slot: int, history: int, finite: bool) -> tuple[int, bool]:
        state = self.states[slot]
        if state == GONE:
            raise Violation("sight", f"a row sees slot {slot}, which is on the free list")
        return crc32(state.to_bytes(4, "little"), history), finite and state != NOT_FINITE

    def _strike(self, spans: Iterable[Span]) -> set[int]:
        """The rows that the script makes non-finite now."""
        rows = set()
        for span in spans if self.strikes else ():
            request_id = span.sequence.request.request_id
            offset = self.strikes.get(request_id, span.num_rows)
            if offset < span.num_rows:
                del self.strikes[request_id]
                rows.add(span.first + offset)
                if offset < span.num_pending:
                    self.struck.add(request_id)
        return rows

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        """Copy slots; all sources are read before any target is written."""
        held = [(self.tokens[move.source], self.states[move.source]) for move in moves]
        if len({move.target for move in moves}) != len(moves) or any(state == GONE for _, state in held):
            self.breach = self.breach or Violation("moves", f"two share a target, or one reads a free slot: {moves}")
        for move, (token, state) in zip(moves, held, strict=True):
            self.tokens[move.target], self.states[move.target] = token, state

    def zero(self, pages: Iterable[int]) -> None:
        """Wipe pages whose content proved to be bad."""
        for page in pages:
            span = slice(page * self.page_size, (page + 1) * self.page_size)
            self.tokens[span] = bytes(self.page_size)
            self.states[span] = array("I", [0]) * self.page_size

    def forget_free(self, pool: PagePool) -> None:
        """Nobody may read a page that nobody holds."""
        gone = array("I", [GONE]) * self.page_size
        for page, holders in enumerate(pool.holders):
            if not holders:
                self.states[page * self.page_size : (page + 1) * self.page_size] = gone
