"""What every row of a step draws: greedy rows in one argmax, all others through the sampler, failures apart.

A row that is not finite draws -1, which no child carries; a row where everything is excluded draws STUCK. If the
sampler raises, every sequence is drawn alone with the same bits, and only the one at fault gets the error. Chains that
were sampled are verified as blocks: their rows draw what is kept of the chain and the token after it, and the walk
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specserve import commit
from specserve.batch import Span, StepBatch
from specserve.block import Probs, SampledChain, StepKey, block_tokens
from specserve.choice import Choice
from specserve.metrics import EngineMetrics
from specserve.processors import Floats
from specserve.request import SamplingParams, Sequence
from specserve.sample import STUCK, Draw, draw_tokens, largest_ids, processed, survivors
from specserve.waits import waits_in

if TYPE_CHECKING:
    from specserve_kernels import Ops

    from specserve.runner import ForwardResult

Masks = Mapping[Sequence, NDArray[np.bool_]]
ChoiceOf = Callable[[Sequence], Choice]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one span drew: the draws in row order (or in choice order for a prompt that forks), and the ids.

    `draws` is empty for plain greedy rows, which report nothing.
    """

    draws: list[Draw]
    ids: list[int]
    error: Exception | None = None


def draw_step(
    step: StepBatch, result: ForwardResult, masks: Masks, choice_of: ChoiceOf, ops: Ops, metrics: EngineMetrics
) -> dict[Sequence, Drawn]:
    """Draw a token at every row that may need one; `masks` are what grammars allow, [1 + nodes, vocab]."""
    metrics.count_waits(waits_in(step.spans, choice_of))
    drawn = _draw_greedy(step, result, choice_of)
    for span in step.spans:
        if isinstance(span.tree, SampledChain) and span.tree.token_ids:
            drawn[span.sequence] = _draw_block(span, span.tree, choice_of(span.sequence), result, ops)
    draws = {
        span.sequence: _draws_of(span, choice_of(span.sequence), masks.get(span.sequence))
        for span in step.spans
        if span.draws and span.sequence not in drawn
    }
    if not draws:
        return drawn
    finite = [result.finite[row] for row in step.logit_rows.tolist()]
    try:
        ids = iter(_draw_rows([draw for group in draws.values() for draw in group], finite, result, ops))
    except Exception:  # find out whose it is: the others are drawn alone, with the same bits
        return drawn | {sequence: _draw_alone(group, finite, result, ops) for sequence, group in draws.items()}
    return drawn | {sequence: Drawn(group, [next(ids) for _ in group]) for sequence, group in draws.items()}


def _draw_alone(group: list[Draw], finite: list[bool], result: ForwardResult, ops: Ops) -> Drawn:
    try:
        return Drawn(group, _draw_rows(group, finite, result, ops))
    except Exception as exc:
        return Drawn(group, [-1] * len(group), exc)


def _draw_rows(draws: list[Draw], finite: list[bool], result: ForwardResult, ops: Ops) -> list[int]:
    ids = iter(draw_tokens(result.logits, [draw for draw in draws if finite[draw.row]], ops))
    return [next(ids) if finite[draw.row] else -1 for draw in draws]


def _draw_greedy(step: StepBatch, result: ForwardResult, choice_of: ChoiceOf) -> dict[Sequence, Drawn]:
    """Sequences that take the largest raw logit and report nothing: one argmax for all, no `Draw` a row."""
    spans = [span for span in step.spans if span.draws and choice_of(span.sequence).plain]
    if not spans:
        return {}
    largest = result.largest or largest_ids(result.logits)
    drawn = {}
    for span in spans:
        rows = result.finite[span.first + span.num_pending - 1 : span.first + span.num_rows]
        ids = list(largest[span.first_logit : span.first_logit + len(rows)])
        ids = ids if all(rows) else [token_id if ok else -1 for token_id, ok in zip(ids, rows, strict=True)]
        drawn[span.sequence] = Drawn([], ids * (span.sequence.num_siblings + 1))
    return drawn


def target_probs(logits: Floats, params: SamplingParams) -> Probs:
    """The law of one draw at T > 0: softmax of what truncation leaves of a row of processed logits, [vocab]."""
    ids, scaled = survivors(logits, params)
    wide = scaled.astype(np.float64)
    weights: Probs = np.exp(wide - wide.max())
    if ids is not None:
        kept, weights = weights[ids], np.zeros_like(weights)
        weights[ids] = kept
    weights /= weights.sum()
    return weights


def _draw_block(span: Span, chain: SampledChain, choice: Choice, result: ForwardResult, ops: Ops) -> Drawn:
    """Rows behind the token after the kept ones draw nothing, -1."""
    draws = _draws_of(span, choice, None)
    try:
        root = draws[0]
        probs, unusable = _block_probs(draws, result.finite[span.first + span.num_pending - 1 :], result, chain)
        tokens = block_tokens(chain, probs, StepKey(root.seed, root.choice, root.draw_index), ops)
        ids = [*tokens, *[-1] * (len(draws) - len(tokens))]
        return Drawn(draws, [unusable.get(row, token_id) for row, token_id in enumerate(ids)])
    except Exception as exc:
        return Drawn(draws, [-1] * len(draws), exc)


def _block_probs(
    draws: list[Draw], finite: list[bool], result: ForwardResult, chain: SampledChain
) -> tuple[Probs, dict[int, int]]:
    """Each row's law, [rows, vocab], and what rows draw that have none.

    Such a row is given the drafter's law: whatever follows it is not kept, and the ids before it keep theirs.
    """
    raw = result.logits.cpu().numpy()
    probs = np.zeros((len(draws), raw.shape[1]))
    probs[:-1] = chain.rows(raw.shape[1])
    probs[-1] = probs[-2]
    unusable = {}
    for row, draw in enumerate(draws):
        logits = processed(raw[draw.row], draw) if finite[row] else None
        if logits is None or logits.max() == -np.inf:
            unusable[row] = -1 if logits is None else STUCK
        else:
            probs[row] = target_probs(logits, draw.params)
    return probs, unusable


def _draws_of(span: Span, choice: Choice, masks: NDArray[np.bool_] | None) -> list[Draw]:
    sequence = span.sequence

    def draw(row: int, path: tuple[int, ...], index: int) -> Draw:
        draw_index = len(sequence.token_ids) + len(path)
        return Draw(
            row=span.first_logit + row,
            draw_index=draw_index,
            choice=index,
            seed=sequence.seed,
            params=sequence.request.params,
            banned=commit.banned_ids(sequence, draw_index, choice.stops),
            path=path,
            history=choice.history,
            mask=None if masks is None else masks[row],
        )

    if sequence.num_siblings:
        return [draw(0, (), index) for index in range(sequence.num_siblings + 1)]
    return [draw(row, path, sequence.choice) for row, path in enumerate([(), *span.tree.paths()])]
