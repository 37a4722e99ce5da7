"""Offline acceptance of a head: what a greedy chain of drafts would have got on answers that are known.

While drafts are accepted they are the answer's own tokens, so the training-time test over the answer *is* the chain,
from every position at once. Walking a greedy answer by what was accepted gives the acceptance length of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve_drafts.train.dataset import DraftVocabulary, Entry, Shards, load_pack
from specserve_drafts.train.head import DraftHead
from specserve_drafts.train.loop import Frozen, scaled

CHUNK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`length`: tokens per step of a greedy chain of drafts, pooled over answers. `per_step`: share of guesses that
    were right, of those that all earlier guesses of their chain were right."""

    length: float
    per_step: tuple[float, ...]
    num_tokens: int

    def __str__(self) -> str:
        return f"acceptance length {self.length:.3f} ({', '.join(f'{share:.2f}' for share in self.per_step)})"


@torch.inference_mode()
def evaluate(
    head: DraftHead,
    shards: Shards,
    entries: Sequence[Entry],
    vocabulary: DraftVocabulary,
    frozen: Frozen,
    num_steps: int = 5,
) -> Acceptance:
    """Chains of `num_steps` over these answers."""
    right = torch.zeros(num_steps, dtype=torch.int64)
    tried = torch.zeros(num_steps, dtype=torch.int64)
    steps = tokens = 0
    for start in range(0, len(entries), 8):
        batch = entries[start : start + 8]
        pack = scaled(load_pack(shards, batch, frozen.vocabulary_mask, num_steps, with_targets=False), frozen.scales)
        outputs = head(pack, frozen.embed, num_steps)
        guessed = torch.stack([vocabulary.ids[_best(rows, frozen.lm_head)] for rows in outputs])
        hits = (guessed == pack.guessed_ids).long().cumprod(0)  # [steps, queries]
        known = pack.guessed_ids >= 0
        alive = torch.cat((torch.ones_like(hits[:1]), hits[:-1])) * known
        right += (hits * known).sum(1)
        tried += alive.sum(1)
        for accepted in torch.split(hits.sum(0), list(pack.num_queries)):
            taken, committed = walk(accepted.tolist())
            steps, tokens = steps + taken, tokens + committed
    shares = (right / tried.clamp_min(1)).tolist()
    return Acceptance(tokens / max(steps, 1), tuple(shares), tokens)


def walk(accepted: Sequence[int]) -> tuple[int, int]:
    """(steps, tokens) of a run that drafts at each root; entry j: drafts accepted when answer token j is the root."""
    root = steps = 0
    while root < len(accepted):
        root += accepted[root] + 1
        steps += 1
    return steps, len(accepted)


def _best(rows: Tensor, lm_head: Tensor) -> Tensor:
    parts = [(rows[i : i + CHUNK_ROWS] @ lm_head.T).argmax(-1) for i in range(0, rows.shape[0], CHUNK_ROWS)]
    return torch.cat(parts)
