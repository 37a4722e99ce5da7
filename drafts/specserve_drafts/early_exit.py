"""Early exit: the target's own first layers, its final norm and its head guess what all layers will say.

No weights and no state of its own. The root and the nodes are run in the slots that the sequence has reserved for this
very step: K and V of the first layers that are written there are what verification writes again. Source: draft &
verify by skipping layers (Zhang et al., 2023), here with nothing trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.forward import Forward
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve_drafts.draft_rows import DraftBatch, Place, Places, num_weights
from specserve_drafts.grow import Level, Root, Shape, TreeGrower


class EarlyExitDrafter:
    """Dynamic trees from the first `num_layers` layers of the target."""

    name = "early_exit"
    wants_top_ids = False

    def __init__(self, forward: Forward, num_layers: int | None = None, shape: Shape | None = None) -> None:
        """`num_layers` None = two thirds of the target's.

        Raises:
            ConfigError: the target has fewer layers.
        """
        most = forward.decoder.config.num_hidden_layers
        self.num_layers = max(most * 2 // 3, 1) if num_layers is None else num_layers
        if self.num_layers > most:
            raise ConfigError(f"early_exit_layers is {num_layers}; the model has {most} layers")
        self._forward = forward
        self._max_positions = forward.decoder.config.max_position_embeddings
        config = forward.decoder.config
        cost = num_weights(config, self.num_layers) / num_weights(config)
        self._trees = TreeGrower(self.name, forward.ops, shape or Shape(round_cost=cost))

    def start(self, view: DraftRow) -> None:
        """No state: the target's KV is all there is."""

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        starts = [row.cached_len + 1 for row in rows]
        places = Places(
            [Place(row.pages, start, start, row.cached_len) for row, start in zip(rows, starts, strict=True)],
            self._forward.page_size,
        )
        roots = [Root.of(row, cap, self._max_positions - row.cached_len) for row, cap in zip(rows, caps, strict=True)]

        def expand(level: Level) -> Tensor:
            return self._logits(places.rows(level))

        return self._trees.grow(roots, self._logits(places.root_rows([row.token_ids[-1] for row in rows])), expand)

    def _logits(self, batch: DraftBatch) -> Tensor:
        decoder = self._forward.decoder
        batch = batch.to(decoder.device)
        hidden, _ = decoder.run(
            batch.ids, batch.positions, batch.slots, batch.attention, self._forward.kv, num_layers=self.num_layers
        )
        return decoder.logits(hidden)

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._trees.learn(view.sequence_id, result)

    def stop(self, view: DraftRow) -> None:
        self._trees.forget(view.sequence_id)
