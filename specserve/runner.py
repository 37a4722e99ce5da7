"""The tensors of an engine: weights and the KV pool. It forwards batches and applies moves, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from specserve_kernels import Ops
from torch import Tensor

from specserve.batch import StepBatch
from specserve.kept import KeptRows
from specserve.models.decoder import Decoder
from specserve.pages import Move


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """fp32 logits [draws, vocab] of the rows that draw; `finite` [rows]: the row's last hidden state is finite.

    `top_ids` [draws][8]: ids of the largest logits, best first; `largest` [draws]: the best alone; () if not known.
    """

    logits: Tensor
    finite: list[bool]
    top_ids: Sequence[Sequence[int]] = ()
    largest: Sequence[int] = ()


# Starts a forward on a device that computes by itself; what it returns waits for the result. One at a time.
Launch = Callable[[StepBatch], Callable[[], ForwardResult]]


class Runner(Protocol):
    """What the engine needs of a device."""

    def forward(self, batch: StepBatch) -> ForwardResult: ...

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None: ...

    def zero(self, pages: Iterable[int]) -> None: ...


class PagedTensors:
    """A decoder and what its pages stand for, on its device. What drafters want of it is in specserve/forward.py."""

    def __init__(self, decoder: Decoder, ops: Ops, num_pages: int, page_size: int, folder: Path | None = None) -> None:
        self.decoder = decoder
        self.folder = folder
        self.ops = ops
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = decoder.device
        # [layers, 2, pages, kv_heads, page_size, head_dim]; in main memory, a page costs nothing until it is written
        self.kv = torch.empty(decoder.config.kv_shape(num_pages, page_size), dtype=decoder.dtype, device=self.device)
        self.kept = KeptRows(num_pages, page_size, decoder.config.hidden_size, decoder.dtype, self.device)
        self._groups: list[Tensor] = []

    @torch.inference_mode()
    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        """Copy slots in every layer; all sources are read before any target is written.

        `copies`: copy-on-write, which carries drafters' layers too; compaction leaves those to their drafters.
        """
        if not moves:
            return
        source, target = torch.tensor([(move.source, move.target) for move in moves], device=self.device).T.contiguous()
        for kv in [self.kv, *self._groups] if copies else [self.kv]:
            self.ops.move_kv(kv, source, target)
        self.kept.move(source, target)

    @torch.inference_mode()
    def zero(self, pages: Iterable[int]) -> None:
        """Wipe pages whose content proved to be bad."""
        index = list(pages)
        if not index:
            return
        for kv in (self.kv, *self._groups):
            kv[:, :, index] = 0
        self.kept.zero(index)

    def add_group(self, kv: Tensor) -> None:
        """Layers of a drafter, by the same page ids."""
        self._groups.append(kv)


class CpuRunner(PagedTensors):
    """Main memory, and one call a forward."""

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> ForwardResult:
        """Run all rows; K and V of every row are in the pool afterwards."""
        hidden, features = self.decoder.run(
            batch.ids, batch.positions, batch.slots, batch.attention, self.kv, feature_layers=self.kept.feature_layers
        )
        self.kept.write(batch.slots, hidden, features)
        logits = self.decoder.logits(hidden[batch.logit_rows])
        return ForwardResult(logits, torch.isfinite(hidden).all(dim=1).tolist())
