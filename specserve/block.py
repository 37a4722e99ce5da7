"""Block verification: the law of the answer is kept, its tokens are not.

For chains at T > 0 whose drafter sampled from `draft_probs`; Sun et al., "Block Verification Accelerates Speculative
Decoding" (ICLR 2025), in log space. The configuration refuses it while no drafter samples (`verification="block"`);
its law is proven by enumeration (tests/test_block_law.py), and so is that its usual mistakes break it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]


def block_weights(draft: Sequence[int], target_probs: Probs, draft_probs: Probs) -> Probs:
    """b_0 … b_g of block verification: how much of the target's mass the drafted block carries, [g + 1].

    b_i = min(1, b_{i-1} · p_i / q_i) over the drafted ids, computed as exp(S_i − max_{j ≤ i} S_j) from the running sum
    S of log p − log q, so that a long block neither overflows nor loses its small ratios.

    Args:
        draft: the g drafted ids, each sampled from its row of `draft_probs`.
        target_probs: [g + 1, vocab], processed, the row before each drafted id and the bonus row.
        draft_probs: [g, vocab], exactly what was sampled from.
    """
    steps = np.arange(len(draft))
    with np.errstate(divide="ignore"):
        ratios = np.log(target_probs[steps, list(draft)]) - np.log(draft_probs[steps, list(draft)])
    sums = np.concatenate([[0.0], np.cumsum(ratios)])
    # once the target excludes a drafted id nothing after it can be kept: -inf stays, and never meets +inf
    weights: Probs = np.exp(sums - np.maximum.accumulate(sums))
    return weights


def block_residual(position: int, weights: Probs, target_probs: Probs, draft_probs: Probs) -> Probs:
    """What the token after `position` kept ids is drawn from, [vocab], summing to 1.

    The bonus row after a whole block; else max(b·p − q, 0), normalised (not p − q, which has another law).
    """
    bonus: Probs = target_probs[position]
    if position == len(draft_probs):
        return bonus
    residual: Probs = np.maximum(weights[position] * bonus - draft_probs[position], 0.0)
    total = residual.sum()
    return residual / total if total > 0 else bonus


def block_acceptance(weights: Probs, target_probs: Probs, draft_probs: Probs) -> Probs:
    """h_0 … h_g: the probability of stopping at i ids if no later position was taken, [g + 1]; h_0 = 1."""
    kept = np.maximum(weights[:-1, None] * target_probs[:-1] - draft_probs, 0.0).sum(axis=1)
    room = kept + 1.0 - weights[:-1]
    inner = np.divide(kept, room, out=np.ones_like(kept), where=room > 0)
    return np.concatenate([inner, weights[-1:]])


def block_length(acceptance: Probs, coins: Sequence[float]) -> int:
    """The largest i with coins[i] ≤ h_i: a later success rescues earlier failures, so all positions are looked at.

    Args:
        acceptance: `block_acceptance`, [g + 1].
        coins: independent uniforms in [0, 1), [g + 1].
    """
    return max((i for i, (h, coin) in enumerate(zip(acceptance, coins, strict=True)) if coin <= h), default=0)
