"""Log-probabilities as a request asks for them: of drawn tokens, of the likeliest, of chosen ids, of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specserve.batch import Span
from specserve.events import TokenLogprobs
from specserve.processors import Floats
from specserve.sample import Draw, best_first, processed, survivors


def _log_softmax(values: Floats) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    top = wide.max()
    shifted: NDArray[np.float64] = wide - (top + np.log(np.exp(wide - top).sum()))
    return shifted


def _report(values: NDArray[np.float64], token_id: int, num_top: int, chosen: Sequence[int]) -> TokenLogprobs:
    best = best_first(values, num_top) if num_top else np.empty(0, np.int64)
    return TokenLogprobs(
        logprob=float(values[token_id]),
        top_ids=tuple(best.tolist()),
        top_logprobs=tuple(values[best].tolist()),
        chosen_logprobs=tuple(values[list(chosen)].tolist()),
    )


def token_logprobs(logits: Tensor, draw: Draw, token_id: int) -> TokenLogprobs:
    """Log-probabilities of one drawn token and of others, as its parameters ask.

    Raw: log softmax of the raw logits. Processed: log softmax over the survivors of processing, ÷ T and truncation,
    -inf for the rest; at T < 1e-5 of the processed logits as they are.
    """
    raw: Floats = logits[draw.row].cpu().numpy()
    params, values = draw.params, raw
    if params.logprobs_mode == "processed":
        values = processed(raw, draw)
        if not params.greedy:
            ids, scaled = survivors(values, params)
            values = scaled if ids is None else np.full_like(scaled, -np.inf)
            if ids is not None:
                values[ids] = scaled[ids]
    return _report(_log_softmax(values), token_id, params.logprobs or 0, params.logprob_token_ids)


def report_draws(
    draws: Sequence[Draw], ids: Sequence[int], rows: Sequence[int], logits: Tensor
) -> list[TokenLogprobs] | None:
    """Of the ids drawn at these rows; asked for before anything is appended, since a draw's history is live."""
    if not draws or draws[0].params.logprobs is None:
        return None
    return [token_logprobs(logits, draws[row], ids[row]) for row in rows]


def report_prompt(known: list[TokenLogprobs | None], span: Span, logits: Tensor) -> None:
    """Append the prompt tokens that follow this chunk's rows, by raw logits; recomputed rows are known already."""
    sequence = span.sequence
    num_top = sequence.request.params.prompt_logprobs
    if span.prompt_logit is None or num_top is None:
        return
    start = sequence.table.cached_len
    for position in range(max(start + 1, len(known)), min(start + span.num_pending + 1, sequence.prompt_len)):
        row = span.prompt_logit + position - 1 - start
        values = _log_softmax(logits[row].cpu().numpy())
        known.append(_report(values, sequence.token_ids[position], num_top, ()))
