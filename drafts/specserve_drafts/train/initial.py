"""A closed-form start: feature scales, and the fc that best predicts the target's next final hidden state.

With the layer's outputs small, the head is then fc, the target's final norm and the target's head: a linear guess at
the token after next, useful from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve_drafts.train.dataset import Entry, Shards
from specserve_drafts.train.head import DraftHead

RIDGE = 1e-3  # of the mean diagonal of the features' second moments
NUM_SEQUENCES = 600


def feature_scales(shards: Shards, entries: Sequence[Entry], hidden_size: int) -> Tensor:
    """Median RMS of each of the three features over some answer rows, repeated to fp32 [3 * hidden]."""
    rows = torch.cat([shards.features(entry, entry.length)[-entry.answer_len :] for entry in entries[:NUM_SEQUENCES:4]])
    rms = rows.float().view(-1, 3, hidden_size).pow(2).mean(-1).sqrt()
    return rms.median(0).values.repeat_interleave(hidden_size)


def initialize(
    head: DraftHead, shards: Shards, entries: Sequence[Entry], scales: Tensor, norm: Tensor, generator: torch.Generator
) -> None:
    """Set all parameters; `norm` is the target's final norm weight, [hidden]."""
    head.initialize(generator)
    head.get_parameter("norm.weight").data.copy_(norm.float())
    width, hidden = scales.shape[0], norm.shape[0]
    moments, cross = torch.zeros(width, width), torch.zeros(width, hidden)
    for entry in entries[:NUM_SEQUENCES]:
        # the row of token i holds what predicts i + 1; the head guesses i + 2 from it, so its goal is the row after
        rows = shards.features(entry, entry.length)[-entry.answer_len - 1 : -1].float() / scales
        goals = shards.hidden(entry)[-rows.shape[0] :].float() / _safe(norm.float())
        moments += rows.T @ rows
        cross += rows.T @ goals
    ridge = RIDGE * moments.diagonal().mean()
    solved = torch.linalg.solve(moments + ridge * torch.eye(width), cross)
    head.fc.weight.data.copy_(solved.T)


def _safe(norm: Tensor) -> Tensor:
    """No division by a weight that is (nearly) zero: such a channel's goal stays small."""
    return torch.where(norm.abs() < 1e-2, torch.full_like(norm, 1e6), norm)
