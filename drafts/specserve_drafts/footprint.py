"""What drafters take of the memory that they share with their target, told by shapes before anything is loaded.

Two numbers: what each token of the pool costs more (kept rows, and layers of a drafter's own), and what is there once
(weights, rotary tables, scratch for nodes). Both are of a device, where a weight is its numbers and no copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from specserve.config import EngineConfig, SpeculationConfig
from specserve.models.decoder import DecoderConfig
from specserve.models.hub import resolve_model
from specserve_drafts.draft_rows import scratch_pages
from specserve_drafts.eagle import QUANTIZATION, shipped_head
from specserve_drafts.eagle_checkpoint import D2T, EMBEDDING, HEAD, T2D, HeadConfig, read_shapes

FP32, INT64 = 4, 8  # bytes

Shape = tuple[int, ...]


class Footprint(NamedTuple):
    """Bytes: of each token of the pool, and of all else."""

    per_token: int
    fixed: int = 0


class _Storage(NamedTuple):
    """Bytes of a number of KV, the format of the target's matrices, and tokens of a page."""

    itemsize: int
    quantization: str | None
    page_size: int


def draft_footprint(config: EngineConfig, target: DecoderConfig, itemsize: int, fingerprint: str) -> Footprint:
    """Of all drafters that this configuration loads for a target of this shape and fingerprint.

    `itemsize` is that of a number of the KV. Raises as loading the drafters does.
    """
    speculation, shipped = config.speculation, shipped_head(fingerprint)
    storage = _Storage(itemsize, config.quantization, config.cache.page_size)
    folder = _head_folder(speculation, shipped)
    head = None if folder is None else read_shapes(folder, target)
    reads_prompts = speculation.drafter in ("auto", "recycling") and shipped is None
    found = [Footprint(_kept_numbers(target, None if head is None else head[0], reads_prompts) * itemsize)]
    if head is not None:
        found.append(_of_head(*head, target, storage))
    if speculation.draft_model is not None:
        found.append(_of_model(DecoderConfig.from_folder(resolve_model(speculation.draft_model)), storage))
    return Footprint(sum(part.per_token for part in found), sum(part.fixed for part in found))


def _head_folder(config: SpeculationConfig, shipped: Path | None) -> Path | None:
    """The head that is loaded, if one is."""
    if config.eagle_head is not None:
        return Path(config.eagle_head)
    return shipped if config.drafter in ("auto", "eagle") else None


def _kept_numbers(target: DecoderConfig, head: HeadConfig | None, reads_prompts: bool) -> int:
    """Of each row: the features that the head reads, and the last hidden state if anybody reads that."""
    reads_hidden = reads_prompts or (head is not None and not head.feature_layers)
    return (len(head.feature_layers if head else ()) + reads_hidden) * target.hidden_size


def _of_model(model: DecoderConfig, storage: _Storage) -> Footprint:
    weights = _packed(model.tensor_shapes().values(), storage.itemsize, storage.quantization)
    return _of_layers(model, storage, weights)


def _of_head(head: HeadConfig, shapes: dict[str, Shape], target: DecoderConfig, storage: _Storage) -> Footprint:
    """At most so much: an embedding that only repeats the target's is dropped when the head is loaded."""
    packed = {name: shape for name, shape in shapes.items() if name not in (EMBEDDING, D2T, T2D)}
    if D2T in shapes or head.body.tie_word_embeddings:  # else the target's output head, if there is none of its own
        packed[HEAD] = (head.draft_vocab_size, head.body.hidden_size)
    weights = _packed(packed.values(), storage.itemsize, QUANTIZATION)
    weights += prod(shapes.get(EMBEDDING, (0,))) * storage.itemsize + prod(shapes.get(D2T, (0,))) * INT64
    body = replace(head.body, max_position_embeddings=target.max_position_embeddings)
    return _of_layers(body, storage, weights)


def _packed(shapes: Iterable[Shape], itemsize: int, quantization: str | None) -> int:
    """An int8 matrix has an fp32 scale for each output."""
    if quantization is None:
        return sum(prod(shape) for shape in shapes) * itemsize
    return sum(shape[0] * (shape[1] + FP32) if len(shape) == 2 else shape[0] * itemsize for shape in shapes)


def _of_layers(body: DecoderConfig, storage: _Storage, weights: int) -> Footprint:
    per_token = prod(body.kv_shape(1, 1)) * storage.itemsize
    rotary = body.max_position_embeddings * body.head_dim * FP32
    scratch = scratch_pages(storage.page_size) * storage.page_size * per_token
    return Footprint(per_token, weights + rotary + scratch)
