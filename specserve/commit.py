"""The one place that cuts an answer: ids, text, logprobs, usage, KV and metrics end at the same token.

A step hands over a run of drawn tokens (the accepted path and the bonus). They are taken one by one; the first that
ends the answer (stop id, stop string, length, in this order at one position) is the last one kept. Text is made here
only if it may end the answer; else specserve/publish.py makes it, when nobody waits for the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from specserve.answertext import AnswerText
from specserve.events import FinishReason
from specserve.request import SamplingParams, Sequence


class Cut(NamedTuple):
    """What is kept of a run. `texts[i]` is what `token_ids[i]` releases; None = not made yet, since ids alone decided.

    `reason` None = the answer goes on.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] | None = None
    reason: FinishReason | None = None
    stop_match: str | int | None = None


def stop_ids(params: SamplingParams, eos_token_ids: SequenceOf[int]) -> frozenset[int]:
    """Ids that end an answer; while min_tokens is not reached they cannot be drawn."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


def banned_ids(sequence: Sequence, draw_index: int, stops: frozenset[int]) -> tuple[int, ...]:
    """What cannot be drawn as token `draw_index`: stop ids, as long as the answer would stay below min_tokens."""
    if draw_index - sequence.prompt_len >= sequence.request.params.min_tokens:
        return ()
    return tuple(sorted(stops))


def cut(sequence: Sequence, run: SequenceOf[int], text: AnswerText, stops: frozenset[int], allowed: int) -> Cut:
    """Keep the longest prefix of `run` that does not pass the end of the answer.

    Args:
        stops: the sequence's `stop_ids`.
        allowed: how many more tokens max_tokens, the model's context and the pool permit, at least 1.
    """
    if not text.searches:
        return _cut_ids(tuple(run[:allowed]), stops, allowed)
    # tokens of the run that come before min_tokens is reached
    num_early = sequence.request.params.min_tokens - sequence.num_output - 1
    kept: list[int] = []
    texts: list[str] = []
    for i, token_id in enumerate(run):
        # a stop id ends the answer by itself, so its own text is not searched
        released, match = text.push(token_id, i >= num_early and token_id not in stops)
        kept.append(token_id)
        texts.append(released)
        if token_id in stops:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.STOP, stop_match=token_id)
        if match is not None:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.STOP, stop_match=match)
        if len(kept) == allowed:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.LENGTH)
    return Cut(token_ids=tuple(kept), texts=tuple(texts))


def _cut_ids(kept: tuple[int, ...], stops: frozenset[int], allowed: int) -> Cut:
    if stops.isdisjoint(kept):
        return Cut(token_ids=kept, reason=FinishReason.LENGTH if len(kept) == allowed else None)
    end = next(i for i, token_id in enumerate(kept) if token_id in stops)
    return Cut(token_ids=kept[: end + 1], reason=FinishReason.STOP, stop_match=kept[end])
