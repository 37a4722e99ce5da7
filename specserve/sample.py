"""Drawing tokens: processed logits, truncation, Gumbel noise, argmax. One row, one thread, fixed order.

The token of draw index i is argmax(processed / T + G) over what truncation left, with G keyed by (seed, choice, i).
Order is stable everywhere (logit descending, id ascending) and ties go to the lowest id. Each row is worked on alone
with arrays of its own, so its bits cannot depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specserve_kernels import PURPOSE_TARGET, FusedSampler, Ops
from torch import Tensor

from specserve.processors import Floats, History, Ids
from specserve.request import SamplingParams

# candidates looked at before a full sort; top-p at usual p needs far fewer
_TOP_P_CANDIDATES = 512

# how many of a row's best ids drafters may learn from
NUM_TOP_IDS = 8

# what a draw yields where processing excluded every id
STUCK = -2


class Draw(NamedTuple):
    """One token to draw: from logits row `row`, as token `draw_index` of the sequence, for one choice.

    `banned` ids cannot be drawn (min_tokens); `seed` has 64 bits. `path` are the draft tokens before this row;
    `history` and `mask` (True = the grammar allows it) are None for requests that have no use for them.
    """

    row: int
    draw_index: int
    choice: int
    seed: int
    params: SamplingParams
    banned: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    history: History | None = None
    mask: NDArray[np.bool_] | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether `processed` gives an array of its own rather than the row itself."""
        return self.history is not None or bool(self.banned)


def processed(logits: Floats, draw: Draw) -> Floats:
    """The row's logits after bias, bans and penalties: the row itself where there are none."""
    if draw.history is not None:
        return draw.history.process(logits, draw.path, draw.banned, draw.mask)
    if not draw.changes_logits:
        return logits
    logits = logits.copy()
    logits[list(draw.banned)] = -np.inf
    return logits


def best_first(logits: Floats | NDArray[np.float64], count: int) -> Ids:
    """Ids of the `count` largest logits, logit descending, id ascending among equals."""
    if count < len(logits):
        edge = np.partition(logits, len(logits) - count)[len(logits) - count]
        above = np.flatnonzero(logits > edge)
        ids = np.concatenate([above, np.flatnonzero(logits == edge)[: count - len(above)]])
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")]


def _top_p(logits: Floats, scaled: Floats, ids: Ids | None, top_p: float) -> Ids:
    """The shortest prefix of `ids` (None = all, best first) whose softmax mass reaches `top_p`; at least one id."""
    pool = scaled if ids is None else scaled[ids]
    weights = np.exp(pool.astype(np.float64) - np.float64(pool.max()))
    wanted = top_p * weights.sum()
    if ids is None:
        ids = best_first(logits, min(_TOP_P_CANDIDATES, len(logits)))
        if weights[ids].sum() < wanted * (1 + 1e-9):
            ids = best_first(logits, len(logits))
        weights = weights[ids]
    reached = np.cumsum(weights) >= wanted
    return ids[: int(np.argmax(reached)) + 1] if reached.any() else ids


def survivors(logits: Floats, params: SamplingParams) -> tuple[Ids | None, Floats]:
    """What truncation leaves of one row of processed logits [vocab] at T > 0.

    Returns:
        (ids, or None for all of them; fp32(logits / T) of all ids). Order of processors: ÷ T, top-k, top-p, min-p.
    """
    scaled = logits / np.float32(params.temperature)
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = best_first(logits, params.top_k)
    if params.top_p < 1.0:
        ids = _top_p(logits, scaled, ids, params.top_p)
    if params.min_p > 0.0:
        pool = scaled if ids is None else scaled[ids]
        keep = np.exp(pool.astype(np.float64) - np.float64(pool.max())) >= params.min_p
        ids = np.flatnonzero(keep) if ids is None else ids[keep]
    return ids, scaled


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed  # 64 bits as an int64 holds them


def _noise(draw: Draw, vocab_size: int, ops: Ops) -> Floats:
    seeds, indices, choices = (torch.tensor([value]) for value in (_signed(draw.seed), draw.draw_index, draw.choice))
    return np.asarray(ops.noise(seeds, indices, choices, PURPOSE_TARGET, vocab_size)[0].numpy())


def _draw_one(logits: Floats, draw: Draw, ops: Ops) -> int:
    if draw.params.greedy:
        return int(np.argmax(logits))
    ids, scaled = survivors(logits, draw.params)
    noise = _noise(draw, len(logits), ops)
    if ids is None:
        return int(np.argmax(scaled + noise))
    ids = np.sort(ids)
    return int(ids[np.argmax(scaled[ids] + noise[ids])])


def _draw_fused(logits: Tensor, draws: Sequence[Draw], sample: FusedSampler) -> list[int]:
    """All rows in one call of the backend, which follows the same definition as `_draw_one`."""
    params = [draw.params for draw in draws]
    arguments = (
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([min(p.top_k, logits.shape[1]) for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        torch.tensor([_signed(draw.seed) for draw in draws]),
        torch.tensor([draw.draw_index for draw in draws]),
        torch.tensor([draw.choice for draw in draws]),
    )
    return list(sample(logits, *(argument.to(logits.device) for argument in arguments)).tolist())


def draw_tokens(logits: Tensor, draws: Sequence[Draw], ops: Ops) -> list[int]:
    """One token id per draw, or STUCK where every id is excluded.

    Args:
        logits: fp32 [rows, vocab], raw; several draws may share a row (choices of one prompt).
    """
    fused = None if all(draw.params.greedy for draw in draws) else ops.sample
    if fused is not None and not any(draw.changes_logits for draw in draws):  # nothing needs a row on the host
        rows = [draw.row for draw in draws]
        return _draw_fused(logits if rows == list(range(len(logits))) else logits[rows], draws, fused)
    raw = logits.cpu().numpy()
    values = [processed(raw[draw.row], draw) for draw in draws]
    stuck = [draw.changes_logits and row.max() == -np.inf for row, draw in zip(values, draws, strict=True)]
    if fused is not None:
        ids = _draw_fused(torch.from_numpy(np.stack(values)).to(logits.device), draws, fused)
    else:
        ids = [_draw_one(row, draw, ops) for row, draw in zip(values, draws, strict=True)]
    return [STUCK if hopeless else token_id for token_id, hopeless in zip(ids, stuck, strict=True)]


def largest_ids(logits: Tensor) -> list[int]:
    """The greedy draw of every row of raw logits [rows, vocab]; ties go to the lowest id."""
    return list(logits.cpu().numpy().argmax(axis=1).tolist())


def top_ids(logits: Tensor, ops: Ops) -> list[list[int]]:
    """Ids of the `NUM_TOP_IDS` largest raw logits of every row of [rows, vocab], best first."""
    return list(ops.top_ids(logits, min(NUM_TOP_IDS, logits.shape[1])).tolist())
