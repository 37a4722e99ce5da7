"""A smaller model of the same tokens guesses: any decoder folder that specserve can load, in the shared pool.

Its layers are a group of their own in the target's pages; committed tokens are filled in as they come, and trees are
grown over them. Its vocabulary must spell the same tokens by the same ids; what only one side has at the end (padding,
added tokens) is never proposed. Its context may be shorter: it then reads the last half of what it can (draft_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specserve.errors import ConfigError
from specserve.forward import Forward
from specserve.models.decoder import Decoder
from specserve.models.hub import resolve_model
from specserve.models.weights import load_decoder
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve_drafts.draft_rows import DraftBatch, DraftLayers, num_weights
from specserve_drafts.grow import Level, Shape, TreeGrower


def load_draft_model(name: str, forward: Forward, window: int) -> DraftModelDrafter:
    """The drafter for a model name (folder, .gguf file or hub id), in the target's dtype and weight format, beside it.

    Raises:
        ModelNotFound, ModelError, WeightsError: the model cannot be had or used.
        ConfigError: its tokens are not the target's, or its context is too short.
    """
    folder = resolve_model(name)
    target = forward.decoder
    num_ids = None if forward.folder is None else num_shared_ids(token_strings(forward.folder), token_strings(folder))
    quantization = None if target.weights.head.scale is None else "int8"
    dtype = str(target.dtype).removeprefix("torch.")
    decoder = load_decoder(folder, forward.ops, dtype, quantization, target.device)
    return DraftModelDrafter(forward, decoder, window, num_ids)


def token_strings(folder: Path) -> list[str | None]:
    """The token of each id, added ones included; None where an id has none.

    Raises:
        ConfigError: there is no tokenizer.json, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    try:
        vocab = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{path} cannot be read, and a draft model's tokens must be compared: {error}") from None
    strings: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        strings[token_id] = token
    return strings


def num_shared_ids(target: Sequence[str | None], draft: Sequence[str | None]) -> int:
    """How many first ids may be proposed: all that both sides have, which must be the same tokens.

    Raises:
        ConfigError: they differ; names the first id that does, and both tokens.
    """
    for token_id, (ours, its) in enumerate(zip(target, draft, strict=False)):
        if ours != its:
            raise ConfigError(
                f"the draft model's tokens are not the target's: id {token_id} is {ours!r} in the target and {its!r} in"
                " the draft model"
            )
    return min(len(target), len(draft))


class DraftModelDrafter:
    """Dynamic trees from a decoder of its own. Ids that the draft model does not have are read as id 0."""

    name = "draft_model"
    wants_top_ids = False

    def __init__(
        self,
        forward: Forward,
        decoder: Decoder,
        window: int,
        num_shared: int | None = None,
        shape: Shape | None = None,
    ) -> None:
        """`num_shared`: how many first ids mean the same to both; None = as many as both have.

        Raises:
            ConfigError: the draft model's context is too short for pages of this size.
        """
        config = decoder.config
        if config.max_position_embeddings < 4 * forward.page_size:
            raise ConfigError(
                f"the draft model's context is {config.max_position_embeddings} tokens;"
                f" pages of {forward.page_size} need at least {4 * forward.page_size}"
            )
        self._decoder = decoder
        self._vocab_size = config.vocab_size
        both = min(config.vocab_size, forward.decoder.config.vocab_size)
        self._num_ids = both if num_shared is None else min(num_shared, both)
        kv_shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self._layers = DraftLayers(
            forward, kv_shape, decoder.dtype, window, config.max_position_embeddings, restarts=True
        )
        cost = num_weights(config) / num_weights(forward.decoder.config)
        self._trees = TreeGrower(self.name, forward.ops, shape or Shape(round_cost=cost))

    def start(self, view: DraftRow) -> None:
        """What is filled in is found out when trees are asked for."""

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        trees = [DraftTree()] * len(rows)
        ready = self._layers.fill(rows, caps, self._hidden)
        if ready is None:
            return trees

        def expand(level: Level) -> Tensor:
            return self._logits(self._hidden(ready.places.rows(level)))

        grown = self._trees.grow(ready.roots, self._logits(ready.outputs), expand)
        for i, tree in zip(ready.indices, grown, strict=True):
            trees[i] = tree
        return trees

    def _hidden(self, batch: DraftBatch) -> Tensor:
        batch = batch.to(self._decoder.device)
        ids = torch.where(batch.ids < self._vocab_size, batch.ids, 0)
        return self._decoder.forward(ids, batch.positions, batch.slots, batch.attention, self._layers.kv)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)[:, : self._num_ids].contiguous()

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self._trees.learn(view.sequence_id, result)

    def stop(self, view: DraftRow) -> None:
        self._layers.forget(view.sequence_id)
        self._trees.forget(view.sequence_id)
