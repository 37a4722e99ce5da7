"""The tensors of an engine on a GPU: steps are padded into static buffers, and CUDA graphs replay them.

A decode step is copied into the buffers of the smallest bucket that holds it (specserve/buckets.py), two transfers in
all, and replayed; ids of the largest logits and which rows are finite come back in one. That is the step's only wait.
Rows of padding see nothing, are written to no slot (slot -1), and are cut off before anybody reads a result. Steps
with prompt chunks, and those beyond every bucket, run the same computation call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

import torch
from specserve_kernels import AttentionRows
from specserve_kernels.triton import TiledRows, TritonOps, rows_in_tile, rows_of_one_launch, tile_bounds, tiled
from torch import Tensor

from specserve.batch import StepBatch
from specserve.buckets import ALONE, Bucket, make_buckets
from specserve.graphs import Graphs, Work
from specserve.models.decoder import Decoder
from specserve.runner import ForwardResult, PagedTensors

NOWHERE = -1  # the slot of a row of padding
WARM_ROWS = (1, 2, 16, 17)  # numbers that kernels are compiled for apart: one, even, multiples of 16, any
WARM_MOVES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward reads, on the device."""

    ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    logit_rows: Tensor  # int64 [draws]
    rows: TiledRows


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What it leaves there. `told` is all that the host waits for: largest ids [draws], then finite or not [rows]."""

    hidden: Tensor  # [rows, hidden]
    features: Tensor  # [layers, rows, hidden]
    logits: Tensor  # fp32 [draws, vocab]
    told: Tensor  # int64 [draws + rows]


class _Block:
    """Arrays of one type in one piece of memory, so that one transfer moves them all."""

    def __init__(self, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        sizes = [prod(shape) for shape in shapes]
        self._host = torch.zeros(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=dtype, device=device)
        here, there = (whole.split_with_sizes(sizes) for whole in (self._host, self._device))
        self.host = [part.view(shape).numpy() for part, shape in zip(here, shapes, strict=True)]
        self.device = [part.view(shape) for part, shape in zip(there, shapes, strict=True)]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class StaticInputs:
    """The inputs of one bucket at fixed addresses; nothing but padding to begin with."""

    def __init__(self, bucket: Bucket, most_in_tile: int, device: torch.device) -> None:
        rows = bucket.rows
        self._num_rows = rows
        self._most_in_tile = 1 if bucket.depth == ALONE else most_in_tile
        self._long = _Block(torch.int64, ((rows,),) * 4, device)
        shapes = ((rows,), (rows,), (rows, bucket.tail_slots), (rows,), (rows, bucket.pages), (rows, 2))
        self._short = _Block(torch.int32, shapes, device)
        sequence, prefix_len, tail_slots, tail_len, page_table, tiles = self._short.device
        attention = TiledRows(
            sequence, prefix_len, tail_slots, tail_len, page_table, tiles, self._most_in_tile, first_rows=()
        )
        ids, positions, slots, logit_rows = self._long.device
        self.inputs = StepInputs(ids, positions, slots, logit_rows, attention)
        self._send([])

    def fill(self, batch: StepBatch) -> None:
        """Lay out a step. Nobody reads the host's side any more: the last step's answer was waited for."""
        rows = batch.attention
        long = (batch.ids, batch.positions, batch.slots, batch.logit_rows)
        short = (rows.sequence, rows.prefix_len, rows.tail_slots, rows.tail_len, rows.page_table)
        for array, tensor in zip((*self._long.host, *self._short.host[:-1]), (*long, *short), strict=True):
            values = tensor.numpy()
            if array.ndim == 1:
                array[: len(values)] = values
            else:  # what is right of and below the step's own corner is arbitrary
                array[: values.shape[0], : values.shape[1]] = values
        self._send([span.num_rows for span in batch.spans])

    def _send(self, counts: list[int]) -> None:
        """Make the rest padding: it sees nothing, alone in a tile of its own, and is written nowhere."""
        ids, positions, slots, _ = self._long.host
        sequence, prefix_len, _, tail_len, _, tiles = self._short.host
        first = sum(counts)
        for array in (ids, positions, sequence, prefix_len, tail_len):
            array[first:] = 0
        slots[first:] = NOWHERE
        bounds = tile_bounds([*counts, *[1] * (self._num_rows - first)], self._most_in_tile)
        tiles[: len(bounds)] = bounds
        tiles[len(bounds) :] = 0
        self._long.send()
        self._short.send()


class _Captured(NamedTuple):
    """One bucket: its inputs, and the work that they are for."""

    static: StaticInputs
    replay: Work


class GpuRunner(PagedTensors):
    """A decoder on its device, over Triton's operations. Buckets: up to `max_rows` a step, `max_pages` a sequence."""

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int,
        page_size: int,
        graphs: Graphs,
        *,
        max_rows: int,
        max_pages: int,
        folder: Path | None = None,
    ) -> None:
        super().__init__(decoder, decoder.ops, num_pages, page_size, folder)
        config, exact = decoder.config, cast(TritonOps, decoder.ops).exact
        self._group, self._head_dim = config.num_attention_heads // config.num_key_value_heads, config.head_dim
        self._max_rows = max_rows

        def most_rows(pages: int) -> int:
            return rows_of_one_launch(config.num_attention_heads, config.head_dim, pages * page_size, exact=exact)

        self._most_rows = most_rows
        self.buckets = make_buckets(max_rows, max_pages, page_size, most_rows)
        self._graphs = graphs
        self._captured: dict[Bucket, _Captured] = {}
        self._outputs: StepOutputs | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> ForwardResult:
        """Run all rows; K and V of every row are in the pool afterwards."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Callable[[], ForwardResult]:
        """Put a forward into the device's queue. Its result holds until the next launch."""
        num_rows, num_draws = batch.num_rows, len(batch.logit_rows)
        bucket = self.bucket_of(batch)
        if bucket is None:
            inputs = self._uploaded(batch)
            outputs, first_finite = self._compute(inputs), num_draws
        else:
            captured = self._captured.get(bucket) or self._capture(bucket)
            captured.static.fill(batch)
            captured.replay()
            inputs, outputs, first_finite = captured.static.inputs, self._static(), bucket.rows
        self.kept.write(inputs.slots[:num_rows], outputs.hidden[:num_rows], outputs.features[:, :num_rows])

        def wait() -> ForwardResult:
            told = outputs.told[: first_finite + num_rows].tolist()
            finite = [bool(flag) for flag in told[first_finite:]]
            return ForwardResult(outputs.logits[:num_draws], finite, largest=told[:num_draws])

        return wait

    def bucket_of(self, batch: StepBatch) -> Bucket | None:
        """The bucket of a step of roots and nodes; None for others, and for those that are too large."""
        if any(span.num_pending > 1 for span in batch.spans):
            return None
        rows = batch.attention
        depth = ALONE if batch.num_rows == len(batch.spans) else rows.tail_slots.shape[1]
        return self.buckets.try_bucket(batch.num_rows, depth, rows.page_table.shape[1])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture every bucket and compile every kernel, on padding and on slots that hold nothing yet.

        To be called when drafters have said what they want to be kept.
        """
        for bucket in self.buckets.largest_first():
            self._capture(bucket)
        pages = self.buckets.pages[0]
        for rows in (*WARM_ROWS, min(self._max_rows, self._most_rows(pages))):
            for depth in (ALONE, 0, 1):
                self._compute(self._padding(Bucket(rows, depth, pages)).inputs)
        for rows in WARM_ROWS:
            self._draw_something(rows)
        for count in WARM_MOVES:
            if count <= self.num_pages * self.page_size:
                slots = torch.arange(count, device=self.device)
                self.ops.move_kv(self.kv, slots, slots)

    def _draw_something(self, rows: int) -> None:
        logits = torch.zeros(rows, self.decoder.config.vocab_size, device=self.device)
        ones, zeros = (torch.full((rows,), value, device=self.device) for value in (1.0, 0.0))
        keys = torch.zeros(rows, dtype=torch.int64, device=self.device)
        if self.ops.sample is not None:
            self.ops.sample(logits, ones, keys.int(), ones.double(), zeros.double(), keys, keys, keys)

    # ---- one step

    def _compute(self, inputs: StepInputs) -> StepOutputs:
        hidden, features = self.decoder.run(
            inputs.ids, inputs.positions, inputs.slots, inputs.rows, self.kv, feature_layers=self.kept.feature_layers
        )
        logits = self.decoder.logits(hidden[inputs.logit_rows])
        told = torch.cat((logits.argmax(dim=1), torch.isfinite(hidden).all(dim=1).long()))
        return StepOutputs(hidden, features, logits, told)

    def _uploaded(self, batch: StepBatch) -> StepInputs:
        """A step as it is."""
        rows, counts = batch.attention, [span.num_rows for span in batch.spans]
        fields = (rows.sequence, rows.prefix_len, rows.tail_slots, rows.tail_len, rows.page_table)
        moved = AttentionRows(*(field.to(self.device) for field in fields))
        attention = tiled(moved, counts, self._group, self._head_dim, self.decoder.dtype)
        given = (batch.ids, batch.positions, batch.slots, batch.logit_rows)
        ids, positions, slots, logit_rows = (tensor.to(self.device) for tensor in given)
        return StepInputs(ids, positions, slots, logit_rows, attention)

    def _padding(self, bucket: Bucket) -> StaticInputs:
        return StaticInputs(bucket, rows_in_tile(self._group, self._head_dim, self.decoder.dtype), self.device)

    def _capture(self, bucket: Bucket) -> _Captured:
        """With rows of padding only: capturing writes nothing that anybody reads."""
        static, kept = self._padding(bucket), self._static()

        def work() -> None:
            found = self._compute(static.inputs)
            kept.hidden[: bucket.rows].copy_(found.hidden)
            kept.features[:, : bucket.rows].copy_(found.features)
            kept.logits[: bucket.rows].copy_(found.logits)
            kept.told[: 2 * bucket.rows].copy_(found.told)

        captured = _Captured(static, self._graphs.capture(work))
        self._captured[bucket] = captured
        return captured

    def _static(self) -> StepOutputs:
        """Where all buckets leave their results: the memory of the largest serves all."""
        if self._outputs is None:
            rows, width = self.buckets.rows[-1], self.decoder.config.hidden_size
            whole = torch.empty(1 + len(self.kept.feature_layers), rows, width, dtype=self.kv.dtype, device=self.device)
            logits = torch.empty(rows, self.decoder.config.vocab_size, dtype=torch.float32, device=self.device)
            told = torch.empty(2 * rows, dtype=torch.int64, device=self.device)
            self._outputs = StepOutputs(whole[0], whole[1:], logits, told)
        return self._outputs
