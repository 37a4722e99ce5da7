"""Rows of draft forwards over the shared pool: a drafter's own layers, how far they are filled, and where nodes go.

A drafter's KV tensor has the target's pages, with slot i of a sequence where the target's is, and behind them pages of
scratch for nodes; it lies where the target runs. Rows are laid out in main memory, and a batch is moved there in one
go. Committed tokens, and the root with them, are filled in at most FILL_ROWS a call; nodes are never kept: what was
accepted comes back as committed tokens. So content depends on committed tokens alone, and whoever fills a page that
sequences share writes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.forward import Forward
from specserve.models.decoder import DecoderConfig
from specserve.proposal import DraftRow
from specserve_drafts.grow import Level, Root
from specserve_drafts.transfer import in_one_transfer

# rows of one call, over all sequences: a step then costs about what one with a chunk of a prompt does
FILL_ROWS = 512
# nodes of one call, over all sequences; in main memory, what is untouched costs nothing
SCRATCH_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One draft forward, as `Decoder.run` takes it, in main memory until it is moved. int64 but `attention`'s int32.

    `previous` is what each row goes on from: the pool-wide slot of the token before it, -1 = there is none; of nodes,
    `Level.parents`.
    """

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows], pool-wide
    previous: Tensor  # [rows]
    attention: AttentionRows

    def to(self, device: torch.device) -> DraftBatch:
        """The batch where it is to be run."""
        seen = self.attention
        fields = (seen.sequence, seen.prefix_len, seen.tail_slots, seen.tail_len, seen.page_table)
        given = (self.ids, self.positions, self.slots, self.previous, *fields)
        ids, positions, slots, previous, *moved = in_one_transfer(given, device)
        return DraftBatch(ids, positions, slots, previous, AttentionRows(*moved))


def scratch_pages(page_size: int) -> int:
    """Pages behind the pool's, for nodes."""
    return -(-SCRATCH_SLOTS // page_size)


def page_table(pages: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """[sequences, most pages], zero-padded."""
    padded = np.zeros((len(pages), max(map(len, pages), default=0)), np.int32)
    for row, values in zip(padded, pages, strict=True):
        row[: len(values)] = values
    return padded


def num_weights(config: DecoderConfig, num_layers: int | None = None) -> int:
    """How many weights a forward of so many layers and the head reads: what a forward of few rows costs."""
    layers = config.num_hidden_layers if num_layers is None else num_layers
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return layers * layer + config.vocab_size * config.hidden_size


class Place(NamedTuple):
    """Where rows of one sequence stand. Slots here are counted in `pages`, of which the last may be scratch.

    The root sees `prefix_len` slots, itself included; `position` is its own. Node slot 0 is at `node_slot`.
    """

    pages: Sequence[int]
    prefix_len: int
    node_slot: int
    position: int


class Places:
    """The sequences that trees are grown for, laid out once for all levels of one `grow`."""

    def __init__(self, places: Sequence[Place], page_size: int) -> None:
        self._page_size = page_size
        self._pages = page_table([place.pages for place in places])
        self._prefix_len = np.array([place.prefix_len for place in places], np.int32)
        self._node_slot = np.array([place.node_slot for place in places])
        self._position = np.array([place.position for place in places])

    def root_rows(self, token_ids: Sequence[int]) -> DraftBatch:
        """The forward of the roots themselves, for a drafter whose past is there already and is all that it reads."""
        count, size = len(self._position), self._page_size
        slots = self._prefix_len.astype(np.int64) - 1
        pages = self._pages[np.arange(count), slots // size].astype(np.int64)
        attention = AttentionRows(
            sequence=torch.arange(count, dtype=torch.int32),
            prefix_len=torch.from_numpy(self._prefix_len),
            tail_slots=torch.zeros(count, 0, dtype=torch.int32),
            tail_len=torch.zeros(count, dtype=torch.int32),
            page_table=torch.from_numpy(self._pages),
        )
        return DraftBatch(
            ids=torch.tensor(token_ids),
            positions=torch.from_numpy(self._position),
            slots=torch.from_numpy(pages * size + slots % size),
            previous=torch.full((count,), -1),
            attention=attention,
        )

    def rows(self, level: Level) -> DraftBatch:
        """The forward of a level whose roots are these places, in order."""
        sequence, size = level.sequence, self._page_size
        slots = self._node_slot[sequence] + level.slots
        attention = AttentionRows(
            sequence=torch.from_numpy(sequence.astype(np.int32)),
            prefix_len=torch.from_numpy(self._prefix_len[sequence]),
            tail_slots=torch.from_numpy((self._node_slot[sequence, None] + level.tails).astype(np.int32)),
            tail_len=torch.from_numpy(level.depths.astype(np.int32)),
            page_table=torch.from_numpy(self._pages),
        )
        pages = self._pages[sequence, slots // size].astype(np.int64)
        return DraftBatch(
            ids=torch.from_numpy(level.token_ids),
            positions=torch.from_numpy(self._position[sequence] + level.depths),
            slots=torch.from_numpy(pages * size + slots % size),
            previous=torch.from_numpy(level.parents),
            attention=attention,
        )


@dataclass(slots=True)
class _Filled:
    """Slots [start, stop) of a sequence hold the drafter's K and V, in pages of this epoch; `start` begins a page.

    `key` stands for what the full pages of [start, keyed) hold: a chain of hashes over salt, start and tokens. Two
    chains that collide cost a bad guess, no more.
    """

    epoch: int
    start: int
    stop: int
    keyed: int
    key: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The sequences that are filled up to their roots and may draft.

    `indices` are theirs among the rows that were given; `outputs` [ready, ...] is what the forward gave for their root
    rows. `roots` and `places` are in the same order, for `TreeGrower.grow` and for its levels.
    """

    indices: list[int]
    roots: list[Root]
    places: Places
    outputs: Tensor


RunRows = Callable[[DraftBatch], Tensor]
"""Moves a batch, runs it through a drafter's layers, K and V into its `kv`; gives one output a row, [rows, ...]."""


class DraftLayers:
    """One drafter's layer group: `kv` [layers, 2, pages + scratch, kv_heads, page_size, head_dim].

    Filling begins with the last `window` tokens of a prompt and goes on with the sequence; a drafter that stayed back
    by more than a window begins anew. `max_positions` is the length of its rotary table. `restarts`: positions count
    from where filling began, and once the table is used up it begins anew with half of it. Otherwise positions
    are the target's.
    """

    def __init__(
        self,
        forward: Forward,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        window: int,
        max_positions: int,
        restarts: bool = False,
    ) -> None:
        """`shape` = (layers, kv_heads, head_dim)."""
        layers, kv_heads, head_dim = shape
        self.page_size = forward.page_size
        self._first_scratch = forward.num_pages
        kv_shape = (layers, 2, forward.num_pages + scratch_pages(self.page_size), kv_heads, self.page_size, head_dim)
        self.kv = torch.empty(kv_shape, dtype=dtype, device=forward.decoder.device)
        forward.add_group(self.kv)
        self._max_positions = max_positions
        self._restarts = restarts
        self._window = min(window, max_positions // 2) if restarts else window
        self._filled: dict[str, _Filled] = {}
        # key of what a full page holds: who is handed it by a prefix hit or a fork need not fill it again
        self._content: dict[int, int] = {}

    def forget(self, sequence_id: str) -> None:
        self._filled.pop(sequence_id, None)

    def fill(self, rows: Sequence[DraftRow], caps: Sequence[int], run: RunRows) -> Ready | None:
        """Fill in committed tokens and roots, where least is missing first; None: nobody is ready.

        If `run` raises, nothing counts as filled.
        """
        filled = [self._filled_of(row) for row in rows]
        batch = _FillRows(self.page_size)
        for i in sorted(range(len(rows)), key=lambda i: rows[i].cached_len - filled[i].stop):
            base = self._base(filled[i])
            batch.add(i, rows[i], filled[i], base, stop=min(rows[i].cached_len + 1, base + self._max_positions))
        if not batch.ids:
            return None
        for page in batch.touched:
            self._content.pop(page, None)
        outputs = run(batch.build())
        for i, stop in batch.stops.items():
            self._advance(rows[i], filled[i], stop)
        return self._ready(rows, caps, filled, batch, outputs)

    def _base(self, filled: _Filled) -> int:
        """The slot at position 0."""
        return filled.start if self._restarts else 0

    def _filled_of(self, row: DraftRow) -> _Filled:
        filled, size = self._filled.get(row.sequence_id), row.cached_len + 1
        if filled is None or filled.epoch != row.epoch:
            filled = self._begin(row, row.prompt_len - self._window)
        self._adopt(row, filled)
        if size - filled.stop > self._window + self.page_size:
            filled = self._begin(row, size - self._window)
        if self._restarts and size - filled.start >= self._max_positions:
            filled = self._begin(row, size - self._max_positions // 2)
        filled.stop = min(filled.stop, row.cached_len)  # the root's output is wanted, even if nothing is new
        return filled

    def _begin(self, row: DraftRow, start: int) -> _Filled:
        start = max(start, 0) // self.page_size * self.page_size
        key = hash((row.salt, start, tuple(row.token_ids[:start])))
        filled = self._filled[row.sequence_id] = _Filled(row.epoch, start, start, start, key)
        return filled

    def _adopt(self, row: DraftRow, filled: _Filled) -> None:
        """Pass over committed pages that hold the very content already.

        The one where a prompt ends may have been written to by a copy, which nobody tells us of.
        """
        size = self.page_size
        while filled.stop == filled.keyed and filled.stop + size <= row.cached_len:
            key, page = self._key_after(row, filled), filled.stop // size
            if page == row.prompt_len // size or self._content.get(row.pages[page]) != key:
                return
            filled.stop, filled.keyed, filled.key = filled.stop + size, filled.stop + size, key

    def _advance(self, row: DraftRow, filled: _Filled, stop: int) -> None:
        filled.stop = stop
        while filled.keyed + self.page_size <= min(stop, row.cached_len):
            filled.key = self._key_after(row, filled)
            self._content[row.pages[filled.keyed // self.page_size]] = filled.key
            filled.keyed += self.page_size

    def _key_after(self, row: DraftRow, filled: _Filled) -> int:
        """The key of the page after those that have one."""
        return hash((filled.key, tuple(row.token_ids[filled.keyed : filled.keyed + self.page_size])))

    def _ready(
        self,
        rows: Sequence[DraftRow],
        caps: Sequence[int],
        filled: Sequence[_Filled],
        batch: _FillRows,
        outputs: Tensor,
    ) -> Ready | None:
        """Places of those whose root was run, as long as there is scratch for their nodes."""
        indices: list[int] = []
        roots: list[Root] = []
        places: list[Place] = []
        used = 0
        for i in batch.root_rows:
            if used + caps[i] > SCRATCH_SLOTS:
                break
            position = rows[i].cached_len - self._base(filled[i])
            indices.append(i)
            roots.append(Root.of(rows[i], caps[i], self._max_positions - position))
            places.append(self._place(rows[i], filled[i], caps[i], used, position))
            used += caps[i]
        if not indices:
            return None
        [root_rows] = in_one_transfer([torch.tensor([batch.root_rows[i] for i in indices])], outputs.device)
        return Ready(indices, roots, Places(places, self.page_size), outputs[root_rows])

    def _place(self, row: DraftRow, filled: _Filled, cap: int, used: int, position: int) -> Place:
        """Scratch slots [used, used + cap) are this sequence's."""
        size = self.page_size
        own = row.pages[filled.start // size : row.cached_len // size + 1]
        scratch = range(self._first_scratch + used // size, self._first_scratch + (used + cap - 1) // size + 1)
        return Place(
            pages=[*own, *scratch],
            prefix_len=row.cached_len + 1 - filled.start,
            node_slot=len(own) * size + used % size,
            position=position,
        )


@dataclass(slots=True)
class _FillRows:
    """Rows of committed tokens, while they are gathered; at most FILL_ROWS, and one a slot."""

    page_size: int
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    prefix_len: list[int] = field(default_factory=list)
    pages: list[Sequence[int]] = field(default_factory=list)
    stops: dict[int, int] = field(default_factory=dict)  # how far each row's sequence gets
    root_rows: dict[int, int] = field(default_factory=dict)  # of the sequences that get to their root
    taken: set[int] = field(default_factory=set)

    @property
    def touched(self) -> set[int]:
        """Pages that are written to."""
        return {slot // self.page_size for slot in self.slots}

    def add(self, index: int, row: DraftRow, filled: _Filled, base: int, stop: int) -> None:
        """Slots [filled.stop, stop) of a sequence, as far as there is room; position 0 is at slot `base`."""
        size, pages = self.page_size, row.pages
        at = filled.stop
        while at < stop:
            slot = pages[at // size] * size + at % size
            if slot not in self.taken:  # else a sequence that shares the page fills it in this very forward
                if len(self.ids) == FILL_ROWS:
                    break
                self.taken.add(slot)
                self.ids.append(row.token_ids[at])
                self.positions.append(at - base)
                self.slots.append(slot)
                self.previous.append(-1 if at == 0 else pages[(at - 1) // size] * size + (at - 1) % size)
                self.sequence.append(len(self.pages))
                self.prefix_len.append(at + 1 - filled.start)
            at += 1
        self.stops[index] = at
        self.pages.append(pages[filled.start // size : -(-at // size)])
        if at == row.cached_len + 1:
            self.root_rows[index] = len(self.ids) - 1

    def build(self) -> DraftBatch:
        count = len(self.ids)
        attention = AttentionRows(
            sequence=torch.tensor(self.sequence, dtype=torch.int32),
            prefix_len=torch.tensor(self.prefix_len, dtype=torch.int32),
            tail_slots=torch.zeros(count, 0, dtype=torch.int32),
            tail_len=torch.zeros(count, dtype=torch.int32),
            page_table=torch.from_numpy(page_table(self.pages)),
        )
        return DraftBatch(
            ids=torch.tensor(self.ids),
            positions=torch.tensor(self.positions),
            slots=torch.tensor(self.slots),
            previous=torch.tensor(self.previous),
            attention=attention,
        )
