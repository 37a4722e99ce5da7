"""Stage 2: what the head will be fed with: one forward over prompt and answer, three hidden states kept of each row.

EAGLE-3 reads the residual stream at the input of layers 2, L // 2 and L - 3. One file per shard of answers holds
these rows (bf16) and the target's final hidden states of the answer rows, from which its logits are remade.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from specserve_kernels import AttentionRows
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve_drafts.train.answers import SHARD_PATTERN, Answer, Progress, read_shard

PAGE_SIZE = 16
MIN_ANSWER_LEN = 3  # the shortest answer with a row to learn from: see dataset.py


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """`prompt_window`: the last tokens of a prompt that the head sees. `max_rows`: rows of one forward, about."""

    prompt_window: int = 384
    max_rows: int = 1024


@dataclass(frozen=True, slots=True)
class SequenceFeatures:
    """One answer with its prompt's last rows; all rows are in order of position."""

    ids: Tensor  # int32 [window + answer]
    features: Tensor  # [window + answer, 3 * hidden]
    hidden: Tensor  # [answer, hidden], after the final norm
    answer_len: int


def auxiliary_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose *inputs* EAGLE-3 reads, 0-based.

    Raises:
        ConfigError: the target has fewer than 7 layers, so that they would not be three.
    """
    if num_layers < 7:
        raise ConfigError(f"the target has {num_layers} layers; an EAGLE-3 head needs one with at least 7")
    return (2, num_layers // 2, num_layers - 3)


def extract_shards(
    decoder: Decoder, answers: Path, folder: Path, config: FeatureConfig, progress: Progress | None = None
) -> list[Path]:
    """Write the feature shards of an answers folder that `folder` lacks; all of them, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = sorted(answers.glob(SHARD_PATTERN))
    found = []
    for done, shard in enumerate(shards, 1):
        path = folder / shard.name.replace("answers-", "features-").replace(".jsonl", ".safetensors")
        if not path.is_file():
            write_features(path, extract(decoder, list(read_shard(shard)), config))
        found.append(path)
        if progress is not None:
            progress("features", done, len(shards))
    return found


def write_features(path: Path, sequences: Sequence[SequenceFeatures]) -> None:
    """One shard, under its name only when it is whole."""
    temporary = path.with_suffix(".tmp")
    tensors = {
        "ids": torch.cat([s.ids for s in sequences]),
        "features": torch.cat([s.features for s in sequences]),
        "hidden": torch.cat([s.hidden for s in sequences]),
        "answer_len": torch.tensor([s.answer_len for s in sequences], dtype=torch.int32),
        "len": torch.tensor([s.ids.shape[0] for s in sequences], dtype=torch.int32),
    }
    save_file(tensors, temporary)
    os.replace(temporary, path)


def extract(decoder: Decoder, answers: Sequence[Answer], config: FeatureConfig) -> list[SequenceFeatures]:
    """Features of every answer that is long enough, in order."""
    kept = [answer for answer in answers if len(answer.answer_ids) >= MIN_ANSWER_LEN]
    return [found for batch in _batches(kept, config.max_rows) for found in _extract_batch(decoder, batch, config)]


def _batches(answers: Sequence[Answer], max_rows: int) -> Iterator[list[Answer]]:
    batch: list[Answer] = []
    rows = 0
    for answer in answers:
        count = len(answer.prompt_ids) + len(answer.answer_ids)
        if batch and rows + count > max_rows:
            yield batch
            batch, rows = [], 0
        batch.append(answer)
        rows += count
    if batch:
        yield batch


@torch.inference_mode()
def _extract_batch(decoder: Decoder, batch: list[Answer], config: FeatureConfig) -> list[SequenceFeatures]:
    ids = [torch.tensor(answer.prompt_ids + answer.answer_ids) for answer in batch]
    lengths = [row.shape[0] for row in ids]
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    starts = torch.tensor([0, *pages]).cumsum(0)
    table = torch.zeros(len(batch), max(pages), dtype=torch.int32)
    for index, count in enumerate(pages):
        table[index, :count] = torch.arange(count) + starts[index]
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths))
    slots = starts[sequence] * PAGE_SIZE + positions
    rows = AttentionRows(
        sequence=sequence.to(torch.int32),
        prefix_len=(positions + 1).to(torch.int32),
        tail_slots=torch.zeros(len(sequence), 0, dtype=torch.int32),
        tail_len=torch.zeros(len(sequence), dtype=torch.int32),
        page_table=table,
    )
    kv = torch.empty(decoder.config.kv_shape(int(starts[-1]), PAGE_SIZE), dtype=decoder.dtype)
    layers = [layer - 1 for layer in auxiliary_layers(decoder.config.num_hidden_layers)]
    hidden, features = decoder.run(torch.cat(ids), positions, slots, rows, kv, feature_layers=layers)
    merged = features.transpose(0, 1).reshape(len(sequence), -1)
    found, end = [], 0
    for answer, row, length in zip(batch, ids, lengths, strict=True):
        end += length
        answer_len = len(answer.answer_ids)
        kept = slice(end - min(length, config.prompt_window + answer_len), end)
        found.append(
            SequenceFeatures(
                ids=row[kept.start - end :].to(torch.int32),
                features=merged[kept].clone(),
                hidden=hidden[end - answer_len : end].clone(),
                answer_len=answer_len,
            )
        )
    return found
