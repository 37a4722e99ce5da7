"""The tensors of an engine: weights and the KV pool. It forwards batches and applies moves, and decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from specserve_kernels import Ops
from torch import Tensor

from specserve.batch import StepBatch
from specserve.models.decoder import Decoder
from specserve.pages import Move


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """fp32 logits [draws, vocab] of the rows that draw; `finite` [rows]: the row's last hidden state is finite.

    `top_ids` [draws][8]: ids of the largest logits, best first; () where no drafter wants them.
    """

    logits: Tensor
    finite: list[bool]
    top_ids: Sequence[Sequence[int]] = ()


class Runner(Protocol):
    """What the engine needs of a device."""

    def forward(self, batch: StepBatch) -> ForwardResult: ...

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None: ...

    def zero(self, pages: Iterable[int]) -> None: ...


class CpuRunner:
    """A decoder and its KV tensor [layers, 2, pages, kv_heads, page_size, head_dim] in main memory.

    What drafters want of it is in specserve/forward.py; kept rows are [slots, width], one row a slot of the pool.
    """

    def __init__(self, decoder: Decoder, ops: Ops, num_pages: int, page_size: int, folder: Path | None = None) -> None:
        self.decoder = decoder
        self.folder = folder
        self.ops = ops
        self.num_pages = num_pages
        self.page_size = page_size
        # untouched memory costs nothing until a page is written
        self.kv = torch.empty(decoder.config.kv_shape(num_pages, page_size), dtype=decoder.dtype)
        self._groups: list[Tensor] = []
        self._feature_layers: tuple[int, ...] = ()
        self._features: Tensor | None = None
        self._hidden: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> ForwardResult:
        """Run all rows; K and V of every row are in the pool afterwards."""
        hidden, features = self.decoder.run(
            batch.ids, batch.positions, batch.slots, batch.attention, self.kv, feature_layers=self._feature_layers
        )
        if self._hidden is not None:
            self._hidden[batch.slots] = hidden
        if self._features is not None:
            self._features[batch.slots] = features.transpose(0, 1).flatten(1)
        finite = torch.isfinite(hidden).all(dim=1)
        logits = self.decoder.logits(hidden[batch.logit_rows])
        return ForwardResult(logits, finite.tolist())

    @torch.inference_mode()
    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        """Copy slots in every layer; all sources are read before any target is written.

        `copies`: copy-on-write, which carries drafters' layers too; compaction leaves those to their drafters.
        """
        if not moves:
            return
        source = torch.tensor([move.source for move in moves])
        target = torch.tensor([move.target for move in moves])
        for kv in [self.kv, *self._groups] if copies else [self.kv]:
            self.ops.move_kv(kv, source, target)
        for kept in (self._hidden, self._features):
            if kept is not None:
                kept[target] = kept[source]

    @torch.inference_mode()
    def zero(self, pages: Iterable[int]) -> None:
        """Wipe pages whose content proved to be bad."""
        index = list(pages)
        if not index:
            return
        for kv in (self.kv, *self._groups):
            kv[:, :, index] = 0
        for kept in (self._hidden, self._features):
            if kept is not None:
                kept.view(self.num_pages, self.page_size, -1)[index] = 0

    # ---- what drafters ask for

    def keep(self, *, hidden: bool = False, feature_layers: Sequence[int] = ()) -> None:
        slots, width = self.num_pages * self.page_size, self.decoder.config.hidden_size
        if hidden and self._hidden is None:
            self._hidden = torch.empty(slots, width, dtype=self.decoder.dtype)
        if feature_layers:
            wanted = tuple(feature_layers)
            if self._feature_layers not in ((), wanted):
                raise ValueError(f"features of layers {self._feature_layers} are kept already, not of {wanted}")
            self._feature_layers = wanted
            self._features = torch.empty(slots, len(wanted) * width, dtype=self.decoder.dtype)

    def hidden(self, slots: Sequence[int]) -> Tensor:
        if self._hidden is None:
            raise ValueError("no hidden states are kept; ask for them when the drafter is made")
        return self._hidden[torch.tensor(slots, dtype=torch.int64)]

    def features(self, slots: Sequence[int]) -> Tensor:
        if self._features is None:
            raise ValueError("no features are kept; ask for them when the drafter is made")
        return self._features[torch.tensor(slots, dtype=torch.int64)]

    def add_group(self, kv: Tensor) -> None:
        self._groups.append(kv)
