"""Token recycling: what the target found likely after a token once, it will find likely again.

Of every row whose logits were computed, rejected ones included, the eight best ids are kept: for the pair of tokens
that the row ends with, and for its last token alone. From a root they make a tree, best first: a node's children are
the successors of its pair, or else of its token, or else of a table that comes with specserve. How likely the first,
second, … of them is, is learned from what the target draws, apart for each kind of entry. Prompt rows had no logits;
of tokens that are new to the table, their kept hidden states go through the head once the first token is out.
Source: Token Recycling (Luo et al., 2024), which knows single tokens and one fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specserve.errors import WeightsError
from specserve.forward import Forward
from specserve.models.decoder import Decoder
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.eagle import shipped_head
from specserve_drafts.merge import Sprout, merge

NUM_SUCCESSORS = 8

# All tables together; an entry takes 370 bytes, and a row of logits makes two.
MAX_ENTRIES = 1 << 18

# Prompt rows that go through the head in a step, and in all of one prompt.
MAX_READ_A_STEP = 64
MAX_READ = 256

# Chance of each successor before anything is known, from greedy answers of the demo model; it weighs as much as so many
# draws. Old counts fade by halving.
_PRIOR = (0.46, 0.12, 0.06, 0.035, 0.025, 0.02, 0.015, 0.01)
_PRIOR_WEIGHT = 8.0
_MEMORY = 2048.0

_SHIPPED, _SINGLE, _PAIR = range(3)
_NEW, _CHANGED, _CONFIRMED = range(3)


SUCCESSORS_FILE = "successors.safetensors"


def shipped_successors(decoder: Decoder) -> Tensor | None:
    """int32 [vocab, up to 8], best first, -1 where no more are known: the table that comes with the target's head.

    Raises:
        WeightsError: there is one, and it is not a table of this vocabulary.
    """
    folder = shipped_head(decoder)
    path = None if folder is None else folder / SUCCESSORS_FILE
    return read_successors(path, decoder.config.vocab_size) if path is not None and path.is_file() else None


def read_successors(path: Path, vocab_size: int) -> Tensor:
    """The tensor `successors` of a file: int32, or uint16 with 65535 for none.

    Raises:
        WeightsError: it is not there, or not a table of so many tokens.
    """
    try:
        stored: Tensor = load_file(path)["successors"]
    except (OSError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{path} holds no tensor 'successors': {type(error).__name__}: {error}") from None
    table = stored.to(torch.int32)
    if stored.dtype == torch.uint16:
        table[table == 0xFFFF] = -1
    if table.dim() != 2 or table.shape[0] != vocab_size or int(table.max()) >= vocab_size:
        raise WeightsError(
            f"{path}: successors is {tuple(table.shape)} of ids up to {int(table.max())}; the model has"
            f" {vocab_size} tokens"
        )
    return table


class Entry(NamedTuple):
    """Successors, best first. `state`: whether the best was the best of the last time, too. `owner` saw them."""

    ids: Sequence[int]
    state: int
    owner: str


_NOTHING = Entry((), _NEW, "")


def _pair(previous: int, token_id: int) -> int:
    """A context of two tokens as one number, which no single token is."""
    return (previous + 1) << 32 | token_id


class Table:
    """The last seen successors of contexts; a context is a token, or a pair of them. The oldest are forgotten first."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def put(self, previous: int, token_id: int, ids: Sequence[int], owner: str) -> None:
        """What may follow these two tokens, and so the second."""
        for context in (token_id, _pair(previous, token_id)):
            old = self.entries.pop(context, None)
            state = _NEW if old is None else _CONFIRMED if old.ids[0] == ids[0] else _CHANGED
            self.entries[context] = Entry(ids, state, owner)

    def drop_oldest(self, count: int) -> None:
        for context in list(islice(self.entries, count)):
            del self.entries[context]


class Tables:
    """A table per tenant, bounded together: the least recently used one loses its oldest entries first."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.num_entries = 0
        self._max_entries = max_entries
        self._tables: dict[Hashable, Table] = {}  # least recently used first
        self._counted: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, tenant: Hashable) -> Table:
        """Its table, empty if it has none yet."""
        table = self._tables.pop(tenant, None) or Table()
        self._tables[tenant] = table
        return table

    def grown(self, tenant: Hashable) -> None:
        """The tenant's table, just used, has new entries: keep the bound."""
        self._count(tenant)
        while self.num_entries > self._max_entries:
            oldest = next(iter(self._tables))
            self._tables[oldest].drop_oldest(self.num_entries - self._max_entries)
            self._count(oldest)
            if not self._tables[oldest].entries:
                self.drop(oldest)

    def drop(self, tenant: Hashable) -> None:
        """Forget a tenant."""
        self._tables.pop(tenant, None)
        self.num_entries -= self._counted.pop(tenant, 0)

    def _count(self, tenant: Hashable) -> None:
        size = len(self._tables[tenant].entries)
        self.num_entries += size - self._counted.get(tenant, 0)
        self._counted[tenant] = size


class Ranks:
    """How often the target drew the first, second, … successor, by kind of entry. Counts only: nobody's text."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, list[float]] = {}  # hits by rank, then trials
        self._chances: dict[Hashable, tuple[float, ...]] = {}

    def chances(self, kind: Hashable) -> tuple[float, ...]:
        """Chance of each successor of an entry of this kind, given that the target is at its context."""
        known = self._chances.get(kind)
        if known is None:
            *hits, trials = self._counts.get(kind) or [0.0] * (NUM_SUCCESSORS + 1)
            weight = _PRIOR_WEIGHT
            known = tuple((n + prior * weight) / (trials + weight) for n, prior in zip(hits, _PRIOR, strict=True))
            self._chances[kind] = known
        return known

    def count(self, kind: Hashable, ids: Sequence[int], drawn: int) -> None:
        """The target drew a token after these successors."""
        counts = self._counts.setdefault(kind, [0.0] * (NUM_SUCCESSORS + 1))
        if counts[-1] >= _MEMORY:
            counts[:] = [value / 2 for value in counts]
        counts[-1] += 1
        if drawn in ids:
            counts[ids.index(drawn)] += 1
        self._chances.pop(kind, None)


class RecyclingDrafter:
    """Trees from what the target itself once thought of next; no model of its own.

    `shipped` integers [vocab, up to 8]: successors to begin with, best first, negative where no more are known.
    Without a `forward`, prompt rows are not looked up.
    """

    name = "recycling"
    wants_top_ids = True

    def __init__(self, forward: Forward | None = None, shipped: Tensor | None = None) -> None:
        self.tables = Tables()
        self._forward = forward
        self._shipped = None if shipped is None else shipped.to(torch.int32).numpy()
        self._ranks = Ranks()
        self._unread: dict[str, list[int]] = {}  # prompt positions to look up, next one last
        if forward is not None:
            forward.kept.keep(hidden=True)

    def start(self, view: DraftRow) -> None:
        if self._forward is not None:
            self._unread[view.sequence_id] = self._worth_reading(view)

    def stop(self, view: DraftRow) -> None:
        self._unread.pop(view.sequence_id, None)
        if not view.salt:
            self.tables.drop(_tenant(view))

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.read_prompts(rows)
        return [merge((), cap, self.sprout(row)) for row, cap in zip(rows, caps, strict=True)]

    def sprout(self, row: DraftRow) -> Sprout:
        """Grows trees below the row's root, of as many nodes as anybody wants."""
        entry_of, ranks, owner, mode = self._finder(row), self._ranks, row.sequence_id, _mode(row)

        def successors(previous: int, token_id: int) -> Iterable[tuple[int, float]]:
            source, entry = entry_of(previous, token_id)
            return zip(entry.ids, ranks.chances((mode, source, entry.state, entry.owner == owner)), strict=False)

        return Sprout(self.name, successors, *_last_two(row.token_ids, len(row.token_ids)))

    def observe(self, view: DraftRow, result: StepResult) -> None:
        """Learn from the draws of the committed rows, then take over the successors of all rows."""
        table, tree, owner = self.tables.of(_tenant(view)), result.tree, view.sequence_id
        first = len(view.token_ids) - len(result.tokens)
        entry_of, mode = self._finder(view), _mode(view)
        for end, drawn in enumerate(result.tokens, first):
            source, entry = entry_of(*_last_two(view.token_ids, end))
            self._ranks.count((mode, source, entry.state, entry.owner == owner), entry.ids, drawn)
        if not result.top_ids:
            return
        previous, root = _last_two(view.token_ids, first)
        on_path = set(result.path)
        rejected = [node for node in range(len(tree)) if node not in on_path]
        for node in (*rejected, *result.path):  # what lies on the path is true, and so it comes last
            parent = tree.parents[node]
            above = tree.token_ids[parent] if parent >= 0 else root
            table.put(above, tree.token_ids[node], result.top_ids[1 + node], owner)
        table.put(previous, root, result.top_ids[0], owner)
        self.tables.grown(_tenant(view))

    def _finder(self, row: DraftRow) -> Callable[[int, int], tuple[int, Entry]]:
        """Finds what is known of two tokens: (what kind of context, its entry)."""
        entries, shipped = self.tables.of(_tenant(row)).entries, self._shipped

        def entry_of(previous: int, token_id: int) -> tuple[int, Entry]:
            entry = entries.get(_pair(previous, token_id))
            if entry is not None:
                return _PAIR, entry
            entry = entries.get(token_id)
            if entry is not None:
                return _SINGLE, entry
            if shipped is None or token_id >= len(shipped):
                return _SHIPPED, _NOTHING
            return _SHIPPED, Entry([i for i in shipped[token_id].tolist() if i >= 0], _NEW, "")

        return entry_of

    # ---- prompt rows

    def _worth_reading(self, view: DraftRow) -> list[int]:
        """Where tokens without an entry occur last in the prompt."""
        known = self.tables.of(_tenant(view)).entries
        last = {token_id: i for i, token_id in enumerate(view.token_ids[: view.prompt_len]) if token_id not in known}
        return sorted(last.values())[-MAX_READ:]

    @torch.inference_mode()
    def read_prompts(self, rows: Sequence[DraftRow]) -> None:
        """Take over the successors of some more prompt rows, from their kept hidden states."""
        forward = self._forward
        if forward is None:
            return
        reads: list[tuple[DraftRow, int]] = []
        for row in rows:
            unread = self._unread.get(row.sequence_id)
            while unread and len(reads) < MAX_READ_A_STEP:
                reads.append((row, unread.pop()))
        if not reads:
            return
        size = forward.page_size
        hidden = forward.kept.hidden([row.pages[i // size] * size + i % size for row, i in reads])
        logits = forward.decoder.logits(hidden)
        best = forward.ops.top_ids(logits, min(NUM_SUCCESSORS, logits.shape[1])).tolist()
        for (row, i), ids in zip(reads, best, strict=True):
            tenant = _tenant(row)
            self.tables.of(tenant).put(*_last_two(row.token_ids, i + 1), ids, row.sequence_id)
            self.tables.grown(tenant)


def _tenant(row: DraftRow) -> Hashable:
    """Whose table the sequence uses: its salt's, or else its own."""
    return row.salt or (row.sequence_id,)


def _mode(row: DraftRow) -> int:
    """Chances are learned apart for greedy sequences, and for each half of a unit of temperature."""
    return 0 if row.temperature < GREEDY_TEMPERATURE else 1 + min(int(2 * row.temperature), 3)


def _last_two(token_ids: Sequence[int], end: int) -> tuple[int, int]:
    """The tokens before `end`, -1 where there is only one."""
    return token_ids[end - 2] if end > 1 else -1, token_ids[end - 1]
