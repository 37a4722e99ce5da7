"""EAGLE: a small head reads the target's hidden states and guesses as if it were the target's next layer.

Its layers are a group of their own in the target's pages. Slot i holds what the head made of token i and the target's
features of token i - 1, so committed tokens are always filled in from true features; only nodes, in scratch, read the
head's own outputs. Trees grow as every model drafter's do (grow.py). Which head: the configured folder, or the shipped
one that was trained for this very target, told by its fingerprint and never by a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.errors import ConfigError, ModelError
from specserve.forward import Forward
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve_drafts.draft_rows import DraftBatch, DraftLayers, num_weights
from specserve_drafts.eagle_check import HeadCheck, check_head
from specserve_drafts.eagle_checkpoint import load_checkpoint, read_fingerprint
from specserve_drafts.eagle_head import EagleHead
from specserve_drafts.grow import Level, Shape, TreeGrower

SHIPPED_HEADS = Path(__file__).parent / "heads"
QUANTIZATION = "int8"


def shipped_head(fingerprint: str) -> Path | None:
    """The folder of the head that comes with specserve for the target of this fingerprint, None if there is none."""
    folders = sorted(SHIPPED_HEADS.iterdir()) if SHIPPED_HEADS.is_dir() else []
    return next((folder for folder in folders if read_fingerprint(folder) == fingerprint), None)


def load_eagle(folder: str | Path | None, forward: Forward, window: int) -> EagleDrafter:
    """The drafter of a head's folder; None: of the shipped head.

    Raises:
        ConfigError: no folder is given and no head comes with specserve for this target.
        ModelError, WeightsError: the head cannot be used, or was trained for another target.
    """
    decoder = forward.decoder
    found = shipped_head(decoder.fingerprint) if folder is None else Path(folder)
    if found is None:
        raise ConfigError(
            "no EAGLE head comes with specserve for this model (fingerprint"
            f" {decoder.fingerprint[:12]}); set eagle_head to the folder of one, or train one"
        )
    checkpoint = load_checkpoint(found, decoder.config)
    if checkpoint.fingerprint not in (None, decoder.fingerprint):
        raise ModelError(
            f"{found}: the head was trained for a target of fingerprint {checkpoint.fingerprint!s:.12}; this one's is"
            f" {decoder.fingerprint[:12]}"
        )
    return EagleDrafter(forward, EagleHead(checkpoint, decoder, QUANTIZATION), window)


class EagleDrafter:
    """Dynamic trees from an EAGLE head."""

    name = "eagle"
    wants_top_ids = False

    def __init__(self, forward: Forward, head: EagleHead, window: int, shape: Shape | None = None) -> None:
        self.head = head
        self._forward = forward
        self._reads_features = bool(head.config.feature_layers)
        body, target = head.config.body, forward.decoder.config
        forward.kept.keep(hidden=not self._reads_features, feature_layers=head.config.feature_layers)
        kv_shape = (body.num_hidden_layers, body.num_key_value_heads, body.head_dim)
        self._layers = DraftLayers(forward, kv_shape, head.dtype, window, target.max_position_embeddings)
        cost = num_weights(replace(body, vocab_size=head.config.draft_vocab_size)) / num_weights(target)
        self._trees = TreeGrower(self.name, forward.ops, shape or Shape(round_cost=cost), head.target_ids)

    def check(self, ids: Sequence[int]) -> HeadCheck:
        """How often the head agrees with its target over some text, as far as its context goes: says when it was
        loaded wrongly."""
        decoder = self._forward.decoder
        return check_head(self.head, decoder, ids[: decoder.config.max_position_embeddings])

    def start(self, view: DraftRow) -> None:
        """What is filled in is found out when trees are asked for."""

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = [DraftTree()] * len(rows)
        ready = self._layers.fill(rows, caps, self._fill)
        if ready is None:
            return trees
        outputs = [ready.outputs]  # of all rows of this call, as `Level.parents` counts them

        def expand(level: Level) -> Tensor:
            batch = self._moved(ready.places.rows(level))
            outputs.append(self._run(batch, self.head.feedback(torch.cat(outputs)[batch.previous])))
            return self.head.logits(outputs[-1])

        grown = self._trees.grow(ready.roots, self.head.logits(ready.outputs), expand)
        for i, tree in zip(ready.indices, grown, strict=True):
            trees[i] = tree
        return trees

    def _fill(self, batch: DraftBatch) -> Tensor:
        """Rows of committed tokens, from what the target kept of the tokens before them."""
        batch = self._moved(batch)
        kept = self._forward.kept.features if self._reads_features else self._forward.kept.hidden
        hidden = self.head.fuse(kept(batch.previous))
        hidden.masked_fill_((batch.previous < 0)[:, None], 0.0)  # slot 0, which nobody reads
        return self._run(batch, hidden)

    def _moved(self, batch: DraftBatch) -> DraftBatch:
        """To where the head is, with what its rows see."""
        attention = without_slot_zero(batch, self._layers.page_size)
        return replace(batch, attention=attention).to(self._forward.decoder.device)

    def _run(self, batch: DraftBatch, hidden: Tensor) -> Tensor:
        return self.head.forward(batch.ids, hidden, batch.positions, batch.slots, batch.attention, self._layers.kv)

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._trees.learn(view.sequence_id, result)

    def stop(self, view: DraftRow) -> None:
        self._layers.forget(view.sequence_id)
        self._trees.forget(view.sequence_id)


def without_slot_zero(batch: DraftBatch, page_size: int) -> AttentionRows:
    """What the rows see, without slot 0 of their sequences: it has no token before it, so no head was trained with it.

    A prefix begins with a page, so the first page is taken out of it, numbered last, and its other slots go before each
    tail. Sequences whose filling began later have no slot 0 in their pages and stay as they are.
    """
    rows = batch.attention
    prefix_len, tail_len, tails = rows.prefix_len.numpy(), rows.tail_len.numpy(), rows.tail_slots.numpy()
    first = batch.positions.numpy() - tail_len + 1 == prefix_len  # filling began at slot 0
    if not first.any():
        return rows
    table = rows.page_table.numpy().copy()
    begins = np.unique(rows.sequence.numpy()[first])
    table[begins] = np.roll(table[begins], -1, axis=1)
    seen = np.where(first, np.minimum(prefix_len, page_size), 0)  # of the first page
    alone = seen == 1  # slot 0 itself: a row must see something
    moved = np.maximum(seen - 1, alone)
    column = np.arange(moved.max() + tails.shape[1])
    joined = (table.shape[1] - 1) * page_size + 1 + column - alone[:, None]
    if tails.shape[1]:
        old = np.clip(column - moved[:, None], 0, tails.shape[1] - 1)
        shifted = np.take_along_axis(tails, old, axis=1) - page_size * first[:, None]
        joined = np.where(column < moved[:, None], joined, shifted)
    return AttentionRows(
        sequence=rows.sequence,
        prefix_len=torch.from_numpy(prefix_len - seen),
        tail_slots=torch.from_numpy(joined.astype(np.int32)),
        tail_len=torch.from_numpy((moved + tail_len).astype(np.int32)),
        page_table=torch.from_numpy(table),
    )
