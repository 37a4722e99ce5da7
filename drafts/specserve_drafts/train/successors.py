"""A table for token recycling: what the target finds likely after a token, and after a pair of tokens.

Every row of the training answers votes for the eight ids that the target itself ranked best there, for the token that
the row ends with and for its pair. Tokens that no answer holds have what follows them in prompts and answers instead.
The table is read only where it is used, and warms a recycling drafter that has seen nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from specserve_kernels import Ops
from torch import Tensor

from specserve_drafts.train.answers import Answer, Progress
from specserve_drafts.train.dataset import Shards

NUM_SUCCESSORS = 8
UNKNOWN = -1
CHUNK_ROWS = 256
LEAST_SEEN = 2  # a pair that occurred once tells little, and there are many of them

# A vote's weight by rank: about the chance that the target draws the id of that rank, against the best one's.
RANK_WEIGHTS = (1.0, 0.45, 0.3, 0.22, 0.18, 0.15, 0.12, 0.1)


class SuccessorTable(NamedTuple):
    """int32, best first, -1 where fewer are known."""

    singles: Tensor  # [vocab, 8]
    pairs: Tensor  # [pairs, 2], ascending
    pair_successors: Tensor  # [pairs, 8]


def make_successors(
    shards: Shards, answers: Iterable[Answer], lm_head: Tensor, ops: Ops, progress: Progress | None = None
) -> SuccessorTable:
    """The table of all answers in the shards; `lm_head` is the target's, [vocab, hidden]."""
    vocab_size = lm_head.shape[0]
    previous, tokens, best = _best_ids(shards, lm_head, ops, progress)
    contexts, found, _ = vote(tokens, best, vocab_size)
    singles = count_successors(answers, vocab_size)
    singles[contexts] = found
    pairs, pair_successors, seen = vote(previous * vocab_size + tokens, best, vocab_size)
    kept = seen >= LEAST_SEEN
    pairs = torch.stack((pairs // vocab_size, pairs % vocab_size), dim=1)[kept].to(torch.int32)
    return SuccessorTable(singles, pairs, pair_successors[kept])


@torch.inference_mode()
def _best_ids(shards: Shards, lm_head: Tensor, ops: Ops, progress: Progress | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of all answer rows: the token before theirs, their token, and the target's best ids [rows, 8]."""
    previous, tokens, best = [], [], []
    weight = ops.pack_linear(lm_head.contiguous())
    for done, entry in enumerate(shards.entries, 1):
        ids = shards.ids(entry)
        tokens.append(ids[-entry.answer_len :])
        previous.append(ids[-entry.answer_len - 1 : -1])
        for hidden in torch.split(shards.hidden(entry).to(lm_head.dtype), CHUNK_ROWS):
            logits = ops.linear(hidden.contiguous(), weight, out_dtype=torch.float32)
            best.append(ops.top_ids(logits, NUM_SUCCESSORS))
        if progress is not None and (done % 64 == 0 or done == len(shards.entries)):
            progress("successors", done, len(shards.entries))
    return torch.cat(previous), torch.cat(tokens), torch.cat(best).long()


def vote(contexts: Tensor, best: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the rows of each context like best: (contexts [n] ascending, int32 [n, 8], rows of each [n]).

    Args:
        contexts: int64 [rows].
        best: int64 [rows, 8], the ids that each row votes for, best first.
    """
    places, place, seen = torch.unique(contexts, return_inverse=True, return_counts=True)
    votes, vote_of = torch.unique(place[:, None] * vocab_size + best, return_inverse=True)
    weights = torch.tensor(RANK_WEIGHTS[: best.shape[1]], dtype=torch.float64).expand(best.shape)
    totals = torch.bincount(vote_of.reshape(-1), weights.reshape(-1), minlength=len(votes))
    return places, _best_of(votes // vocab_size, votes % vocab_size, totals, len(places)), seen


def count_successors(answers: Iterable[Answer], vocab_size: int) -> Tensor:
    """What followed each token most often, int32 [vocab, 8].

    A pair in an answer counts double: it is what the target says. Special tokens of the chat template count as any.
    """
    parts: list[Tensor] = []
    for answer in answers:
        ids = torch.tensor(answer.prompt_ids + answer.answer_ids)
        pairs = ids[:-1] * vocab_size + ids[1:]
        parts += [pairs, pairs[len(answer.prompt_ids) - 1 :]]
    pairs, counts = torch.unique(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), return_counts=True)
    return _best_of(pairs // vocab_size, pairs % vocab_size, counts.double(), vocab_size)


def _best_of(places: Tensor, ids: Tensor, scores: Tensor, num_places: int) -> Tensor:
    """int32 [places, 8]: the ids with the highest scores of each place, ties by lowest id.

    `places` and `ids` ascend together, each pair of them once.
    """
    table = torch.full((num_places, NUM_SUCCESSORS), UNKNOWN, dtype=torch.int32)
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(places[order], stable=True)]
    place = places[order].contiguous()
    rank = torch.arange(len(order)) - torch.searchsorted(place, place)
    kept = rank < NUM_SUCCESSORS
    table[place[kept], rank[kept]] = ids[order][kept].to(torch.int32)
    return table


def write_successors(path: Path, table: SuccessorTable) -> None:
    """`successors`, `pairs` and `pair_successors`; uint16 with 65535 for unknown where all ids fit, else int32."""
    small = len(table.singles) < 65535
    tensors = {"successors": table.singles, "pairs": table.pairs, "pair_successors": table.pair_successors}
    stored = {
        name: torch.where(found < 0, 65535, found).to(torch.uint16) if small else found
        for name, found in tensors.items()
    }
    save_file({name: found.contiguous() for name, found in stored.items()}, path)
