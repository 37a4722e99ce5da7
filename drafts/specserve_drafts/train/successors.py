"""A table for token recycling: of each token the ids that followed it most, in training prompts and answers.

It is read only where it is used, and warms a recycling drafter that has seen nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve_drafts.train.answers import Answer

NUM_SUCCESSORS = 8
UNKNOWN = -1


def count_successors(answers: Iterable[Answer], vocab_size: int) -> Tensor:
    """int32 [vocab, 8], most frequent first, ties by lowest id; -1 where fewer are known.

    A pair in an answer counts double: it is what the target says. Special tokens of the chat template count as any.
    """
    parts: list[Tensor] = []
    for answer in answers:
        ids = torch.tensor(answer.prompt_ids + answer.answer_ids)
        pairs = ids[:-1] * vocab_size + ids[1:]
        parts += [pairs, pairs[len(answer.prompt_ids) - 1 :]]
    table = torch.full((vocab_size, NUM_SUCCESSORS), UNKNOWN, dtype=torch.int32)
    if not parts:
        return table
    pairs, counts = torch.unique(torch.cat(parts), return_counts=True)  # ascending, so ties stay by lowest id
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[torch.argsort(pairs[order] // vocab_size, stable=True)]
    first, second = pairs[order] // vocab_size, pairs[order] % vocab_size
    starts = torch.searchsorted(first, first)  # of each token's own run
    rank = torch.arange(first.shape[0]) - starts
    kept = rank < NUM_SUCCESSORS
    table[first[kept], rank[kept]] = second[kept].to(torch.int32)
    return table


def write_successors(path: Path, table: Tensor) -> None:
    """One tensor, `successors`; uint16 with 65535 for unknown where all ids fit, else int32 with -1."""
    small = table.shape[0] < 65535
    stored = torch.where(table < 0, 65535, table).to(torch.uint16) if small else table
    save_file({"successors": stored.contiguous()}, path)
