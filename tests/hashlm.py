"""A target without weights: the next token is a hash of every token before it, read back through the page tables.

The runner keeps what each slot of the pool holds and computes each row from the slots that its `AttentionRows` makes
visible. So a wrong slot, a stale page, a lost copy or a missed compaction changes the output, and the test that
compares it with `continuation` notices. Slots that nobody holds are poisoned after every step.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch

from specserve.batch import StepBatch
from specserve.engine import Engine
from specserve.pages import Move
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.runner import ForwardResult


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    return zlib.crc32(",".join(map(str, tokens)).encode()) % vocab_size


def continuation(prompt: Sequence[int], vocab_size: int, stops: Iterable[int], max_tokens: int) -> list[int]:
    """What plain greedy decoding must answer."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class HashRunner:
    """A `specserve.runner.Runner` over one list of slots; rows that see a token of `fault_on` are not finite."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.fault_on: set[int] = set()
        self.raise_next: Exception | None = None
        self.num_compactions = 0
        self._logits = torch.empty(0)

    def forward(self, batch: StepBatch) -> ForwardResult:
        if self.raise_next is not None:
            exc, self.raise_next = self.raise_next, None
            raise exc
        slots = batch.slots.tolist()
        if len(set(slots)) != len(slots):
            raise AssertionError(f"two rows write one slot: {slots}")
        for slot, token in zip(slots, batch.ids.tolist(), strict=True):
            self.slots[slot] = token
        contexts = [self._visible(batch, row) for row in range(batch.num_rows)]
        logits = torch.full((len(batch.logit_rows), self.vocab_size), -1.0)
        for i, row in enumerate(batch.logit_rows.tolist()):
            logits[i, next_token(contexts[row], self.vocab_size)] = 1.0
        finite = [not self.fault_on.intersection(context) for context in contexts]
        return ForwardResult(logits, finite)

    def launch(self, batch: StepBatch) -> Callable[[], ForwardResult]:
        """As a device would: done at once, but it is told, trouble included, when somebody waits for it.

        Results share memory: the next launch spoils the logits of the last.
        """
        self._logits.fill_(float("nan"))
        try:
            result = self.forward(batch)
            self._logits = result.logits
        except RuntimeError as planted:
            error = planted
        else:
            return lambda: result

        def wait() -> ForwardResult:
            raise error

        return wait

    def _visible(self, batch: StepBatch, row: int) -> list[int]:
        rows = batch.attention
        pages = rows.page_table[int(rows.sequence[row])].tolist()
        tail = rows.tail_slots[row, : int(rows.tail_len[row])].tolist()
        indices = [*range(int(rows.prefix_len[row])), *tail]
        tokens = [self.slots[pages[i // self.page_size] * self.page_size + i % self.page_size] for i in indices]
        if None in tokens:
            raise AssertionError(f"row {row} sees a slot that holds nothing: {tokens}")
        if len(tokens) != int(batch.positions[row]) + 1:
            raise AssertionError(f"row {row} at position {int(batch.positions[row])} sees {len(tokens)} tokens")
        return [token for token in tokens if token is not None]

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        if len({move.target for move in moves}) != len(moves):
            raise AssertionError("two moves share a target")
        held = [self.slots[move.source] for move in moves]
        for move, token in zip(moves, held, strict=True):
            self.slots[move.target] = token
        self.num_compactions += bool(moves)

    def zero(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.slots[page * self.page_size : (page + 1) * self.page_size] = [0] * self.page_size

    def poison_free(self, engine: Engine) -> None:
        """Nobody may read a page that nobody holds."""
        for page, holders in enumerate(engine.pool.holders):
            if not holders:
                self.slots[page * self.page_size : (page + 1) * self.page_size] = [None] * self.page_size


class HashTreeDrafter:
    """Random trees in which the truth hides with probability `truth` per level, seldom as the first child."""

    name = "hashtree"
    wants_top_ids = False

    def __init__(self, seed: int, vocab_size: int, truth: float) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._truth = truth
        self.live: set[str] = set()
        self.num_branched_paths = 0

    def start(self, view: DraftRow) -> None:
        self.live.add(view.sequence_id)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._tree(row, cap) for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self.num_branched_paths += result.path != tuple(range(len(result.path)))

    def stop(self, view: DraftRow) -> None:
        self.live.discard(view.sequence_id)

    def _tree(self, row: DraftRow, cap: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        frontier = [(-1, list(row.token_ids))]
        while frontier and len(ids) < cap:
            parent, context = frontier.pop(0)
            children = self._random.sample(range(self._vocab_size), self._random.randint(0, 2))
            if self._random.random() < self._truth:
                truth = next_token(context, self._vocab_size)
                children = [*(child for child in children if child != truth), truth]
            for token in children[: cap - len(ids)]:
                frontier.append((len(ids), [*context, token]))
                ids.append(token)
                parents.append(parent)
        return DraftTree(tuple(ids), tuple(parents), (self.name,) * len(ids))
