"""From feature shards to packs: the draft vocabulary, soft targets, the held-out part, a seeded order of training.

Which sequences go into which step is a function of the shards, the seed and the step alone, so that a run that was
killed continues with exactly the packs it would have had.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specserve_drafts.train.answers import Progress
from specserve_drafts.train.head import Pack
from specserve_drafts.train.loss import soft_targets

HELD_OUT_EVERY = 50
STEP_DECAY = 0.8  # weight of a step of the training-time test against the one before


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one sequence lies: rows [start, start + length) of a shard, answer rows [answer_start, + answer_len)."""

    shard: int
    start: int
    length: int
    answer_start: int
    answer_len: int

    @property
    def num_queries(self) -> int:
        """Rows with a token to guess: the answer's first token is the root of the first draft."""
        return self.answer_len - 1


@dataclass(frozen=True, slots=True)
class Shards:
    """Feature files, their soft targets beside them (once made), and an index of all sequences."""

    paths: tuple[Path, ...]
    entries: tuple[Entry, ...]
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Shards:
        """Index the shards."""
        entries = []
        for shard, path in enumerate(paths):
            with safe_open(path, framework="pt") as file:
                lengths, answers = file.get_tensor("len").tolist(), file.get_tensor("answer_len").tolist()
            start = answer_start = 0
            for length, answer_len in zip(lengths, answers, strict=True):
                entries.append(Entry(shard, start, length, answer_start, answer_len))
                start, answer_start = start + length, answer_start + answer_len
        return cls(tuple(paths), tuple(entries))

    def split(self) -> tuple[list[Entry], list[Entry]]:
        """(training, held-out) sequences; every 50th is held out."""
        train = [entry for index, entry in enumerate(self.entries) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        return train, list(self.entries[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])

    def rows(self, path: Path, name: str, start: int, count: int) -> Tensor:
        """Part of one tensor of a file."""
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = safe_open(path, framework="pt")
        part: Tensor = file.get_slice(name)[start : start + count]
        return part

    def ids(self, entry: Entry) -> Tensor:
        return self.rows(self.paths[entry.shard], "ids", entry.start, entry.length).long()

    def answer_ids(self, entry: Entry) -> Tensor:
        return self.ids(entry)[-entry.answer_len :]

    def features(self, entry: Entry, count: int) -> Tensor:
        """The first `count` rows."""
        return self.rows(self.paths[entry.shard], "features", entry.start, count)

    def hidden(self, entry: Entry) -> Tensor:
        return self.rows(self.paths[entry.shard], "hidden", entry.answer_start, entry.answer_len)

    def targets(self, entry: Entry) -> Tensor:
        return self.rows(targets_path(self.paths[entry.shard]), "targets", entry.answer_start, entry.answer_len)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target ids that a head can guess, ascending."""

    ids: Tensor  # int64 [draft vocabulary]
    vocab_size: int

    @classmethod
    def of_answers(cls, answers: Iterable[Tensor], vocab_size: int, size: int) -> DraftVocabulary:
        """The `size` most frequent ids of the answers; ties, and what is missing, by lowest id."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for ids in answers:
            counts += torch.bincount(ids, minlength=vocab_size)
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[: min(size, vocab_size)].sort().values, vocab_size)

    def mask(self) -> Tensor:
        """t2d: bool [vocab], whether an id is in the draft vocabulary."""
        found = torch.zeros(self.vocab_size, dtype=torch.bool)
        found[self.ids] = True
        return found

    def digest(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def targets_path(features: Path) -> Path:
    return features.with_name(features.name.replace("features-", "targets-"))


def write_targets(shards: Shards, head: Tensor, vocabulary: DraftVocabulary, progress: Progress | None = None) -> None:
    """Soft targets of every shard that has none of this vocabulary; `head` is the target's, [vocab, hidden]."""
    rows = head[vocabulary.ids].contiguous()
    digest = vocabulary.digest()
    for done, path in enumerate(shards.paths, 1):
        target = targets_path(path)
        if not _has_digest(target, digest):
            with safe_open(path, framework="pt") as file:
                hidden = file.get_tensor("hidden").to(rows.dtype)
            temporary = target.with_suffix(".tmp")
            with torch.inference_mode():
                save_file({"targets": soft_targets(hidden, rows)}, temporary, metadata={"vocabulary": digest})
            os.replace(temporary, target)
        if progress is not None:
            progress("targets", done, len(shards.paths))


def _has_digest(path: Path, digest: str) -> bool:
    if not path.is_file():
        return False
    with safe_open(path, framework="pt") as file:
        return bool((file.metadata() or {}).get("vocabulary") == digest)


def plan_packs(entries: Sequence[Entry], max_queries: int, epochs: int, seed: int) -> list[list[Entry]]:
    """The packs of all steps: each epoch in an order of its own, cut where `max_queries` would be passed."""
    packs: list[list[Entry]] = []
    for epoch in range(epochs):
        order = list(entries)
        random.Random(f"{seed} {epoch}").shuffle(order)
        pack: list[Entry] = []
        queries = 0
        for entry in order:
            if pack and queries + entry.num_queries > max_queries:
                packs.append(pack)
                pack, queries = [], 0
            pack.append(entry)
            queries += entry.num_queries
        packs.append(pack)
    return packs


def load_pack(
    shards: Shards, entries: Sequence[Entry], mask: Tensor, num_steps: int, with_targets: bool = True
) -> Pack:
    """One pack; `mask` is the vocabulary's t2d. Each step's weights sum to STEP_DECAY ** step."""
    lengths = tuple(entry.length - 2 for entry in entries)
    next_ids, shifted = [], []
    for entry, count in zip(entries, lengths, strict=True):
        ids = shards.ids(entry)
        next_ids.append(ids[1 : 1 + count])
        shifted.append(_shifted(ids[-entry.answer_len :], num_steps))
    reads, guesses = (torch.cat([pair[side] for pair in shifted], dim=1) for side in (0, 1))
    judged = (guesses >= 0) & mask[guesses.clamp_min(0)]
    decay = STEP_DECAY ** torch.arange(num_steps, dtype=torch.float32)[:, None]
    weights = decay * judged / judged.sum(1, keepdim=True).clamp_min(1)
    targets = [_shifted_rows(shards.targets(entry), num_steps) for entry in entries] if with_targets else []
    return Pack(
        features=torch.cat([shards.features(entry, count) for entry, count in zip(entries, lengths, strict=True)]),
        next_ids=torch.cat(next_ids),
        lengths=lengths,
        num_queries=tuple(entry.num_queries for entry in entries),
        query_ids=reads,
        targets=torch.cat(targets, dim=1) if targets else torch.empty(0),
        weights=weights,
        guessed_ids=guesses,
    )


def _shifted(answer: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """What each query reads and guesses in each step, [steps, answer - 1]; past the end 0 and -1."""
    count = answer.shape[0] - 1
    padded = torch.cat((answer, answer.new_full((num_steps,), -1)))
    windows = padded.unfold(0, count, 1)  # [steps + 2, answer - 1]
    return windows[:num_steps].clamp_min(0), windows[1 : num_steps + 1].clone()


def _shifted_rows(rows: Tensor, num_steps: int) -> Tensor:
    """Row j + k of the answer for query j in step k, [steps, answer - 1, hidden]; zeros past the end."""
    count = rows.shape[0] - 1
    padded = torch.cat((rows, rows.new_zeros(num_steps, rows.shape[1])))
    return torch.stack([padded[step : step + count] for step in range(num_steps)])
