"""Block verification: the law of the answer is kept, its tokens are not.

For chains at T > 0 whose drafter sampled from `draft_probs`; Sun et al., "Block Verification Accelerates Speculative
Decoding" (ICLR 2025), in log space. How long a chain is must be settled before its first token is sampled, and every
step needs noise that no earlier step has looked at. The law is proven by enumeration (tests/test_block_law.py), and so
is that the usual mistakes break it; tests/test_block_engine.py has the same for what surrounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specserve_kernels import PURPOSE_ACCEPTANCE, PURPOSE_DRAFT, PURPOSE_TARGET

from specserve.proposal import DraftTree

if TYPE_CHECKING:
    from specserve_kernels import Ops

Probs = NDArray[np.float64]
DEPTH_SHIFT = 8


@dataclass(frozen=True, slots=True)
class SampledChain(DraftTree):
    """A chain whose node i was sampled from `draft_probs[i]`, [draft vocabulary]: exactly that, in fp64.

    `target_ids` int64 [draft vocabulary] are the target's ids of the draft's; None = the first of them. `survival` must
    not tell anything of the sampled ids: by it the chain may be cut short.
    """

    draft_probs: tuple[Probs, ...] = field(default=(), compare=False)
    target_ids: NDArray[np.int64] | None = field(default=None, compare=False)

    def rows(self, vocab_size: int) -> Probs:
        """`draft_probs` over the target's ids, [nodes, vocab]."""
        rows = np.zeros((len(self), vocab_size))
        for row, probs in zip(rows, self.draft_probs, strict=True):
            row[slice(len(probs)) if self.target_ids is None else self.target_ids] = probs
        return rows

    def fault(self, vocab_size: int) -> str | None:
        """Why this chain cannot be verified, or None if it can."""
        found = DraftTree.fault(self, vocab_size)
        if found is not None or not self.token_ids:
            return found
        if self.parents != tuple(range(-1, len(self) - 1)):
            return "was sampled and is no chain"
        if len(self.draft_probs) != len(self):
            return f"has {len(self)} sampled nodes and {len(self.draft_probs)} distributions"
        rows = self.rows(vocab_size)
        sums, own = rows.sum(axis=1), rows[np.arange(len(self)), list(self.token_ids)]
        wrong = ~(np.abs(sums - 1.0) < 1e-6) | (rows.min(axis=1) < 0.0) | ~(own > 0.0)
        if not wrong.any():
            return None
        node = int(np.argmax(wrong))
        return f"samples node {node} from what is no distribution with its id (sum {sums[node]}, its own {own[node]})"

    def keep(self, nodes: Sequence[int]) -> SampledChain:
        """The first nodes, with what they were sampled from."""
        kept = DraftTree.keep(self, nodes)
        probs = self.draft_probs[: len(kept)]
        return SampledChain(kept.token_ids, kept.parents, kept.drafters, kept.survival, probs, self.target_ids)


class StepKey(NamedTuple):
    """What a step's noise is keyed by, next to its purpose: `draw_index` is that of the first token it yields."""

    seed: int
    choice: int
    draw_index: int


def draft_purpose(depth: int) -> int:
    """Purpose of the noise that a node of this depth, 1 below the root, is sampled with at its own draw index.

    Steps may draft one index again and again, each at another depth. What a step kept tells something of the noise of
    all that it drafted, so the next step must have new noise there.
    """
    return PURPOSE_DRAFT + (depth << DEPTH_SHIFT)


def _noise(key: StepKey, purpose: int, size: int, ops: Ops) -> NDArray[np.float32]:
    seed = key.seed - (1 << 64) if key.seed >= 1 << 63 else key.seed
    seeds, indices, choices = (torch.tensor([value]) for value in (seed, key.draw_index, key.choice))
    return np.asarray(ops.noise(seeds, indices, choices, purpose, size)[0].numpy())


def block_tokens(chain: SampledChain, target_probs: Probs, key: StepKey, ops: Ops) -> list[int]:
    """The tokens that a step yields: as much of the chain as is kept, and the one after it.

    That one is drawn with the target's noise of its draw index: no other step looks at it.

    Args:
        target_probs: [nodes + 1, vocab], processed, of the root's row and of each node's.
    """
    draft_probs = chain.rows(target_probs.shape[1])
    weights = block_weights(chain.token_ids, target_probs, draft_probs)
    noise = _noise(key, PURPOSE_ACCEPTANCE, len(weights), ops).astype(np.float64)
    coins = np.exp(-np.exp(-noise))  # the uniforms behind the noise
    length = block_length(block_acceptance(weights, target_probs, draft_probs), coins.tolist())
    after = block_residual(length, weights, target_probs, draft_probs)
    if length < len(chain):
        after = after.copy()
        after[chain.token_ids[length]] = 0.0  # so it is, but for rounding; the walk would take it for accepted
    key = key._replace(draw_index=key.draw_index + length)
    with np.errstate(divide="ignore"):
        scores = np.log(after) + _noise(key, PURPOSE_TARGET, len(after), ops)
    return [*chain.token_ids[:length], int(np.argmax(scores))]


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
