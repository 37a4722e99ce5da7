"""Attention of rows of new tokens over a paged past, split over keys, in two numerics.

A program takes a tile of query rows (rows of one sequence × the query heads of one kv head) through one split of the
keys, block by block (flash decoding, Dao et al. 2023), and stores what it found: an unnormalised sum of values, the
largest score and the sum of weights. A second kernel merges the splits of a row in order.

`exact` visits a row's keys by position: splits are [k * EXACT_SPLIT, (k + 1) * EXACT_SPLIT) of positions, and a tail's
slots are gathered in path order. Rows of one sequence share a tile below their tails; in the splits that a tail
reaches, each row with one is alone. Sharing changes no bit: a row's products and sums are the same instructions in
every tile (there is one tile size), and a block that a row does not see multiplies what it has by exp2(0) = 1 and adds
zeros. `fast` visits slots: nodes may stand in any of the 64 slots after a row's prefix, and a bit mask made from its
tail says which of them it sees, so that a whole tree shares every block. Its splits depend on the load.

A block in which some row of the tile must not see some slot takes values that are not finite out of the product and
makes the rows that do see them NaN: nothing is ever multiplied by a zero weight unless it is finite.
"""

# Kernels are Triton's language in Python's clothes: their arguments are pointers and scalars that it types itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.ops import AttentionRows
from specserve_kernels.triton.kv import is_fp8, scales_or, stored
from specserve_kernels.triton.launch import (
    ATTENTION_STAGES,
    ATTENTION_WORKSPACE_BYTES,
    EXACT_BLOCK,
    EXACT_SPLIT,
    EXACT_TILE,
    FAST_BLOCK,
    FAST_PROGRAMS,
    FAST_SPLIT_MIN,
    FAST_TILE_LARGE,
    FAST_TILE_SMALL,
    FAST_TILE_WIDE,
    FP32_BLOCK,
    FP32_TILE,
    FP32_TILE_WIDE,
    MERGE_SPLITS,
    MERGE_WARPS,
    padded,
    start,
)
from specserve_kernels.triton.numerals import product, rounded

MAX_NODES = 64  # slots after the prefix that a tail may use in `fast` numerics: bits of one word
_NODES = tl.constexpr(MAX_NODES)
FP32_OVER_FP8 = 128  # the widest heads of fp32 queries over an fp8 cache: wider ones spill whatever the tile


@dataclass(frozen=True, slots=True)
class TiledRows(AttentionRows):
    """Rows with a plan of which of them share a tile; `AttentionRows` alone means that every row has its own.

    A tile is some consecutive rows of one sequence, at most `rows_in_tile` of them. `tiles` int32 [tiles, 2] holds
    first row and count on the device (count 0: a tile of padding); `first_rows` are the same first rows on the host,
    which may be () if there are no more rows than `rows_of_one_launch`.
    """

    tiles: Tensor
    rows_in_tile: int
    first_rows: tuple[int, ...]


def _fast_tile(dim: int) -> int:
    return FAST_TILE_LARGE if dim <= 64 else FAST_TILE_WIDE


def _fp32_tile(dim: int) -> int:
    return FP32_TILE if dim <= 64 else FP32_TILE_WIDE


def rows_in_tile(group: int, dim: int, dtype: torch.dtype) -> int:
    """How many rows a tile holds where `group` query heads of `dim` share a kv head; `dtype` is that of the queries."""
    most = _fp32_tile(dim) if dtype is torch.float32 else min(EXACT_TILE, _fast_tile(dim))
    return max(1, most // group)


def tile_bounds(counts: Sequence[int], most: int) -> list[tuple[int, int]]:
    """First row and count of every tile of at most `most` rows, for runs of so many rows of one sequence each."""
    bounds: list[tuple[int, int]] = []
    first = 0
    for count in counts:
        bounds += [(first + done, min(most, count - done)) for done in range(0, count, most)]
        first += count
    return bounds


def rows_of_one_launch(heads: int, dim: int, max_len: int, *, exact: bool) -> int:
    """How many rows over at most `max_len` slots are certainly one launch, whatever their tiles."""
    splits = -(-max_len // (EXACT_SPLIT if exact else FAST_SPLIT_MIN))
    return ATTENTION_WORKSPACE_BYTES // (heads * splits * (dim + 2) * 4)


def tiled(rows: AttentionRows, counts: Sequence[int], group: int, dim: int, dtype: torch.dtype) -> TiledRows:
    """Plan tiles for rows that come in runs of one sequence each; `counts` are the lengths of the runs, in order."""
    bounds = tile_bounds(counts, rows_in_tile(group, dim, dtype))
    tiles = torch.tensor(bounds, dtype=torch.int32).reshape(-1, 2).to(rows.sequence.device)
    fields = (rows.sequence, rows.prefix_len, rows.tail_slots, rows.tail_len, rows.page_table)
    largest = max((count for _, count in bounds), default=1)
    return TiledRows(*fields, tiles=tiles, rows_in_tile=largest, first_rows=tuple(row for row, _ in bounds))


@triton.jit
def _values(codes, like):
    """Cache elements as the queries' type; e4m3 codes are fp16 bits in the wrong place, times 2^8."""
    if codes.dtype == tl.uint8:
        wide = codes.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(like.dtype)
    else:
        value = codes
    return value


@triton.jit
def _tree_masks(tail_slots, row, prefix, tail, depth, live):
    """Of each row: bit b of two words = whether it sees slot prefix + b, and one past the last slot that it sees."""
    early = tl.zeros(row.shape, tl.int32)
    late = tl.zeros(row.shape, tl.int32)
    reach = prefix
    for step in range(depth):
        on_path = live & (step < tail)
        slot = tl.load(tail_slots + row.to(tl.int64) * depth + step, mask=on_path, other=0)
        bit = tl.where(on_path, slot - prefix, 0)
        flag = tl.full(row.shape, 1, tl.int32) << (bit & 31)
        early = tl.where(on_path & (bit < 32), early | flag, early)
        late = tl.where(on_path & (bit >= 32), late | flag, late)
        reach = tl.where(on_path, tl.maximum(reach, slot + 1), reach)
    return early, late, reach


@triton.jit
def _attend_block(
    queries, total, largest, weight, k_cache, v_cache, pages, head, n, slot, some, visible, scale,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new (total, largest, weight). `some` [keys]: any row sees it; `visible` [tile, keys]."""
    dim = tl.arange(0, DIM_PADDED)[None, :]
    page = tl.load(pages + slot // PAGE, mask=some, other=0).to(tl.int64)
    place = (((page * KV_HEADS + head) * PAGE + slot % PAGE) * DIM)[:, None] + dim
    seen = some[:, None] & (dim < DIM)
    keys = _values(tl.load(k_cache + place, mask=seen, other=0), queries)
    score = product(queries, tl.trans(keys), tl.zeros([queries.shape[0], keys.shape[0]], tl.float32))
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(largest, tl.max(score, axis=1) * scale)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(largest - anchor)
    prob = tl.exp2(score * scale - anchor[:, None])
    weight = weight * fade + tl.sum(prob, axis=1)
    total = total * fade[:, None]
    values = _values(tl.load(v_cache + place, mask=seen, other=0), queries)
    if MASKED:
        finite = tl.abs(values.to(tl.float32)) < float("inf")
        tainted = tl.max(tl.where(finite, 0, 1), axis=1)
        caught = tl.max(tl.where(visible, tainted[None, :], 0), axis=1)
        total += tl.where(caught > 0, float("nan"), 0.0)[:, None]
        values = tl.where(finite, values, 0.0).to(queries.dtype)
    return product(rounded(prob, queries.dtype), values, total), higher, weight


@triton.jit
def attend_kernel(
    q, k_cache, v_cache, scales, out, largest_out, weight_out,
    tiles, sequence, prefix_len, tail_slots, tail_len, page_table,
    first_row, num_tiles, depth, table_width, split_size, num_splits, window, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PLANNED: tl.constexpr, EXACT: tl.constexpr, DIRECT: tl.constexpr,
    FP8: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One tile, one kv head, one split. With a plan and `exact`, programs past the tiles are rows with tails, alone."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = first_row + index
    count = 1
    if PLANNED:
        alone = index >= num_tiles
        tile = tl.minimum(index, num_tiles - 1)
        first = tl.where(alone, first_row + index - num_tiles, tl.load(tiles + 2 * tile))
        count = tl.where(alone, 1, tl.load(tiles + 2 * tile + 1))
    lane = tl.arange(0, TILE)
    row = first + lane // GROUP
    live = lane < count * GROUP
    prefix = tl.load(prefix_len + row, mask=live, other=0)
    tail = tl.load(tail_len + row, mask=live, other=0)
    start = split * split_size
    stop = start + split_size
    reach = prefix + tail
    early = tl.zeros([TILE], tl.int32)
    late = tl.zeros([TILE], tl.int32)
    if EXACT:
        if PLANNED:
            live = live & (((tail > 0) & (stop > prefix)).to(tl.int32) == alone.to(tl.int32))
    elif depth > 0:
        early, late, reach = _tree_masks(tail_slots, row, prefix, tail, depth, live)
    found = live & (start < reach) if EXACT else live
    if tl.max(found.to(tl.int32), axis=0) == 0:
        return
    low = tl.maximum(prefix + tail - window, 0) if WINDOW else tl.zeros([TILE], tl.int32)
    begin = tl.maximum(start, tl.min(tl.where(live, low, stop), axis=0) // BLOCK * BLOCK)
    end = tl.minimum(stop, tl.max(tl.where(live, reach, 0), axis=0))
    common = begin  # up to here every row sees every slot
    if not WINDOW:
        common += tl.maximum(tl.minimum(tl.min(tl.where(live, prefix, stop), axis=0), end) - begin, 0) // BLOCK * BLOCK

    dim = tl.arange(0, DIM_PADDED)[None, :]
    query_head = head * GROUP + lane % GROUP
    place = (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head)[:, None] * DIM + dim
    queries = tl.load(q + place, mask=live[:, None] & (dim < DIM), other=0.0)
    v_scale = 1.0
    if FP8:
        scale = scale * tl.load(scales + head)
        v_scale = tl.load(scales + KV_HEADS + head)
    pages = page_table + tl.load(sequence + first).to(tl.int64) * table_width
    path = tail_slots + first.to(tl.int64) * depth
    path_start = tl.load(prefix_len + first)
    path_len = tl.load(tail_len + first)
    if PLANNED:
        path_len = tl.where(alone, path_len, 0)
    total = tl.zeros([TILE, DIM_PADDED], tl.float32)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    for block in range(begin, common, BLOCK):
        n = block + tl.arange(0, BLOCK)
        total, largest, weight = _attend_block(
            queries, total, largest, weight, k_cache, v_cache, pages, head, n, n, n < common, n[None, :] < 0, scale,
            KV_HEADS, PAGE, DIM, DIM_PADDED, False,
        )  # fmt: skip
    for block in range(common, end, BLOCK):
        n = block + tl.arange(0, BLOCK)
        slot = n
        visible = n[None, :] < reach[:, None]
        if EXACT:
            step = n - path_start
            in_tail = (step >= 0) & (step < path_len)
            slot = tl.where(in_tail, tl.load(path + step, mask=in_tail, other=0), n)
        else:
            bit = n[None, :] - prefix[:, None]
            on_path = tl.where(bit < 32, early[:, None], late[:, None]) >> (bit & 31)
            visible = visible & ((bit < 0) | ((bit < _NODES) & ((on_path & 1) == 1)))
        if WINDOW:
            visible = visible & (n[None, :] >= low[:, None])
        visible = visible & live[:, None]
        some = tl.max(visible.to(tl.int32), axis=0) > 0
        total, largest, weight = _attend_block(
            queries, total, largest, weight, k_cache, v_cache, pages, head, n, slot, some, visible, scale,
            KV_HEADS, PAGE, DIM, DIM_PADDED, True,
        )  # fmt: skip

    if DIRECT:
        result = tl.where((weight == 0.0)[:, None], 0.0, total / weight[:, None] * v_scale)
        tl.store(out + place, rounded(result, out.dtype.element_ty), mask=live[:, None] & (dim < DIM))
    else:
        partial = ((row - first_row).to(tl.int64) * (KV_HEADS * GROUP) + query_head) * num_splits + split
        tl.store(out + partial[:, None] * DIM + dim, total * v_scale, mask=found[:, None] & (dim < DIM))
        tl.store(largest_out + partial, largest, mask=found)
        tl.store(weight_out + partial, weight, mask=found)


@triton.jit
def merge_kernel(
    totals, largest_in, weight_in, prefix_len, tail_len, out, first_row, num_splits, split_size,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One row and query head: its splits in order, SPLITS at once. A row that sees nothing gives zeros."""
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(prefix_len + row) + tl.load(tail_len + row)
    count = tl.cdiv(length, split_size) if EXACT else tl.where(length > 0, num_splits, 0)
    base = (tl.program_id(0).to(tl.int64) * HEADS + head) * num_splits
    dim = tl.arange(0, DIM_PADDED)
    highest = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, count, SPLITS):
        split = first + tl.arange(0, SPLITS)
        highest = tl.maximum(highest, tl.load(largest_in + base + split, mask=split < count, other=float("-inf")))
    anchor = tl.max(highest, axis=0)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    total = tl.zeros([DIM_PADDED], tl.float32)
    weight = tl.zeros([SPLITS], tl.float32)
    for first in range(0, count, SPLITS):
        split = first + tl.arange(0, SPLITS)
        known = split < count
        fade = tl.exp2(tl.load(largest_in + base + split, mask=known, other=float("-inf")) - anchor)
        weight += fade * tl.load(weight_in + base + split, mask=known, other=0.0)
        place = (base + split)[:, None] * DIM + dim[None, :]
        part = tl.load(totals + place, mask=known[:, None] & (dim < DIM)[None, :], other=0.0)
        total += tl.sum(fade[:, None] * part, axis=0)
    divisor = tl.sum(weight, axis=0)
    result = tl.where(divisor == 0.0, 0.0, total / divisor)
    place = (row.to(tl.int64) * HEADS + head) * DIM + dim
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=dim < DIM)


@dataclass(frozen=True, slots=True)
class _Call:
    """What all launches of one attention call share."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scales: Tensor
    rows: AttentionRows
    scale: float
    window: int
    exact: bool
    out: Tensor
    splits: int
    split_size: int

    @property
    def rows_in_tile(self) -> int:
        return self.rows.rows_in_tile if isinstance(self.rows, TiledRows) else 1

    @property
    def tile(self) -> int:
        """Query rows of a tile; in exact numerics always the same."""
        if self.q.dtype is torch.float32:
            return padded(max(_fp32_tile(self.q.shape[2]), self.group))
        if self.exact:
            return padded(max(EXACT_TILE, self.group))
        most, least = self.rows_in_tile * self.group, _fast_tile(self.q.shape[2])
        return FAST_TILE_SMALL if most <= FAST_TILE_SMALL and least == FAST_TILE_LARGE else padded(max(least, most))

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def num_tiles(self) -> int:
        return self.rows.tiles.shape[0] if isinstance(self.rows, TiledRows) else self.q.shape[0]


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float, *, exact: bool = True,
    window: int = 0, scales: Tensor | None = None, max_len: int | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of q [rows, heads, head_dim] over the visible slots → [rows, heads, head_dim].

    `rows` as AttentionRows or, with shared tiles, TiledRows. In fast numerics the slots of a tail lie in the MAX_NODES
    slots after the row's prefix, and a window with tails is at least MAX_NODES. A row at position p sees positions
    above p - `window` (0: all). `scales` fp32 [2, kv_heads] of an fp8 cache. `max_len` bounds the slots of every row;
    None: all that the page table could name. A row that sees nothing gives zeros. Nothing waits for the device.

    Raises:
        ValueError: the window is too small for trees, or fp32 queries over an fp8 cache have too wide heads.
    """
    depth = rows.tail_slots.shape[1]
    if q.dtype is torch.float32 and q.shape[2] > FP32_OVER_FP8 and is_fp8(k_cache):
        raise ValueError(f"fp32 queries over an fp8 cache have heads of at most {FP32_OVER_FP8}, not {q.shape[2]}")
    if not exact and depth and 0 < window < MAX_NODES:
        raise ValueError(f"fast attention over trees needs a window of at least {MAX_NODES}")
    max_len = max_len or rows.page_table.shape[1] * k_cache.shape[2]
    k_cache, v_cache, fp8 = stored(k_cache), stored(v_cache), is_fp8(k_cache)
    num_tiles = rows.tiles.shape[0] if isinstance(rows, TiledRows) else q.shape[0]
    splits, size = (
        (-(-max_len // EXACT_SPLIT), EXACT_SPLIT) if exact else _splits(num_tiles * k_cache.shape[1], max_len)
    )
    call = _Call(
        q, k_cache, v_cache, scales_or(scales, k_cache, fp8), rows, scale, window, exact, torch.empty_like(q), splits,
        size,
    )  # fmt: skip
    for tiles, some_rows in _batches(call):
        _attend(call, tiles, some_rows)
    return call.out


def _splits(programs: int, max_len: int) -> tuple[int, int]:
    """Number and size of splits that fill the device in fast numerics."""
    wanted = min(max(1, FAST_PROGRAMS // max(1, programs)), -(-max_len // FAST_SPLIT_MIN))
    size = -(-max_len // max(1, wanted) // 64) * 64
    return -(-max_len // size), size


def _batches(call: _Call) -> Iterator[tuple[range, range]]:
    """Tiles and rows of each launch: all at once unless their partial results would not fit the workspace."""
    rows, heads, dim = call.q.shape
    bytes_per_row = heads * call.splits * (dim + 2) * 4
    if rows * bytes_per_row <= ATTENTION_WORKSPACE_BYTES or (call.splits == 1 and not call.exact):
        yield range(call.num_tiles), range(rows)
        return
    at_once = max(1, ATTENTION_WORKSPACE_BYTES // bytes_per_row // call.rows_in_tile)
    for tile in range(0, call.num_tiles, at_once):
        tiles = range(tile, min(tile + at_once, call.num_tiles))
        if isinstance(call.rows, TiledRows):
            bounds = (*call.rows.first_rows, rows)
            yield tiles, range(bounds[tiles.start] if tiles.start else 0, bounds[tiles.stop])
        else:
            yield tiles, range(tiles.start, tiles.stop)


def _attend(call: _Call, tiles: range, some_rows: range) -> None:
    q, rows = call.q, call.rows
    heads, dim = q.shape[1:]
    kv_heads, page_size = call.k_cache.shape[1:3]
    planned, depth = isinstance(rows, TiledRows), rows.tail_slots.shape[1]
    direct = call.splits == 1 and not call.exact
    partials = len(some_rows) * heads * call.splits
    totals = call.out if direct else q.new_empty(partials, dim, dtype=torch.float32)
    largest, weight = (totals if direct else q.new_empty(partials, dtype=torch.float32) for _ in range(2))
    lone = len(some_rows) if call.exact and planned and depth else 0
    blocks = FP32_BLOCK if q.dtype is torch.float32 else EXACT_BLOCK if call.exact else FAST_BLOCK
    block, warps = blocks[padded(dim, 16)]
    start(
        attend_kernel, (len(tiles) + lone, kv_heads, call.splits), q, call.k_cache, call.v_cache, call.scales, totals,
        largest, weight, rows.tiles[tiles.start :] if isinstance(rows, TiledRows) else rows.sequence, rows.sequence,
        rows.prefix_len, rows.tail_slots, rows.tail_len, rows.page_table, some_rows.start, len(tiles), depth,
        rows.page_table.shape[1], call.split_size, call.splits, call.window, call.scale * math.log2(math.e),
        GROUP=call.group, KV_HEADS=kv_heads, PAGE=page_size, DIM=dim, DIM_PADDED=padded(dim, 16), TILE=call.tile,
        BLOCK=block, PLANNED=planned, EXACT=call.exact, DIRECT=direct, FP8=call.k_cache.dtype is torch.uint8,
        WINDOW=call.window > 0, warps=warps, stages=ATTENTION_STAGES,
    )  # fmt: skip
    if not direct:
        start(
            merge_kernel, (len(some_rows), heads), totals, largest, weight, rows.prefix_len, rows.tail_len, call.out,
            some_rows.start, call.splits, call.split_size, HEADS=heads, DIM=dim, DIM_PADDED=padded(dim, 16),
            SPLITS=MERGE_SPLITS, EXACT=call.exact, warps=MERGE_WARPS,
        )  # fmt: skip
