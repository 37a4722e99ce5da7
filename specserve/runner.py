"""The tensors of an engine: weights and the KV pool. It forwards batches and applies moves, and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from specserve_kernels import Ops
from torch import Tensor

from specserve.batch import StepBatch
from specserve.models.decoder import Decoder
from specserve.pages import Move


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """fp32 logits [draws, vocab] of the rows that draw; `finite` [rows]: the row's last hidden state is finite."""

    logits: Tensor
    finite: list[bool]


class Runner(Protocol):
    """What the engine needs of a device."""

    def forward(self, batch: StepBatch) -> ForwardResult: ...

    def apply(self, moves: Sequence[Move]) -> None: ...

    def zero(self, pages: Iterable[int]) -> None: ...


class CpuRunner:
    """A decoder and its KV tensor [layers, 2, pages, kv_heads, page_size, head_dim] in main memory."""

    def __init__(self, decoder: Decoder, ops: Ops, num_pages: int, page_size: int) -> None:
        self.decoder = decoder
        self.ops = ops
        # untouched memory costs nothing until a page is written
        self.kv = torch.empty(decoder.config.kv_shape(num_pages, page_size), dtype=decoder.dtype)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> ForwardResult:
        """Run all rows; K and V of every row are in the pool afterwards."""
        hidden = self.decoder.forward(batch.ids, batch.positions, batch.slots, batch.attention, self.kv)
        finite = torch.isfinite(hidden).all(dim=1)
        logits = self.decoder.logits(hidden[batch.logit_rows])
        return ForwardResult(logits, finite.tolist())

    @torch.inference_mode()
    def apply(self, moves: Sequence[Move]) -> None:
        """Copy slots in every layer; all sources are read before any target is written."""
        if moves:
            source = torch.tensor([move.source for move in moves])
            target = torch.tensor([move.target for move in moves])
            self.ops.move_kv(self.kv, source, target)

    @torch.inference_mode()
    def zero(self, pages: Iterable[int]) -> None:
        """Wipe pages whose content proved to be bad."""
        index = list(pages)
        if index:
            self.kv[:, :, index] = 0
