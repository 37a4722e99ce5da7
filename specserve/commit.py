"""The one place that cuts an answer: ids, text, logprobs, usage, KV and metrics end at the same token.

A step hands over a run of drawn tokens (the accepted path and the bonus). They are taken one by one; the first that
ends the answer (stop id, stop string, length, in this order at one position) is the last one kept.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from specserve.answertext import AnswerText
from specserve.choice import Choice
from specserve.events import Delta, Finished, FinishReason, Started, Timing, Token, TokenLogprobs, Usage
from specserve.request import SamplingParams, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is kept of a run: `token_ids[i]` releases `texts[i]`. `reason` None = the answer goes on."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
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
    if not text.searches and stops.isdisjoint(run):
        ids = tuple(run[:allowed])
        reason = FinishReason.LENGTH if len(ids) == allowed else None
        return Cut(token_ids=ids, texts=text.push_all(ids), reason=reason)
    # tokens of the run that come before min_tokens is reached
    num_early = sequence.request.params.min_tokens - sequence.num_output - 1
    kept: list[int] = []
    texts: list[str] = []
    for i, token_id in enumerate(run):
        # a stop id ends the answer by itself, so its own text is not searched
        released, match = text.push(token_id, text.searches and i >= num_early and token_id not in stops)
        kept.append(token_id)
        texts.append(released)
        if token_id in stops:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.STOP, stop_match=token_id)
        if match is not None:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.STOP, stop_match=match)
        if len(kept) == allowed:
            return Cut(token_ids=tuple(kept), texts=tuple(texts), reason=FinishReason.LENGTH)
    return Cut(token_ids=tuple(kept), texts=tuple(texts))


def started(choice: Choice, numerics: str, rule: str, logprobs: SequenceOf[TokenLogprobs | None] | None) -> Started:
    """The first event of a request, told by the first choice that has a token; `logprobs` are those of its prompt."""
    sequence = choice.sequence
    return Started(
        request_id=sequence.request.request_id,
        prompt_tokens=sequence.prompt_len,
        cached_tokens=sequence.cached_tokens or 0,
        queue_ms=choice.times.queue_ms,
        seed=sequence.seed,
        numerics=numerics,
        verification=rule,
        drafter=sequence.stats.drafter,
        prompt_logprobs=None if logprobs is None else tuple(logprobs),
    )


def delta(choice: Choice, kept: Cut, num_drafted: int, logprobs: SequenceOf[TokenLogprobs] | None, now: float) -> Delta:
    """What one step committed; the first `num_drafted` tokens were drafts."""
    if choice.first_token_at is None:
        choice.first_token_at = now
    told = logprobs or (None,) * len(kept.token_ids)
    drafted = (True,) * num_drafted + (False,) * (len(kept.token_ids) - num_drafted)
    tokens = tuple(map(Token, kept.token_ids, kept.texts, drafted, told))
    sequence = choice.sequence
    return Delta(request_id=sequence.request.request_id, index=sequence.choice, tokens=tokens, time=now)


def finished(choice: Choice, kept: Cut, now: float) -> Finished:
    """The last event of a choice; text that is still held comes out unless a stop string claimed it."""
    if kept.reason is None or choice.first_token_at is None:
        raise ValueError("the answer goes on")
    sequence, start = choice.sequence, choice.times.submitted_at
    num_after_first = sequence.num_output - 1
    return Finished(
        request_id=sequence.request.request_id,
        index=sequence.choice,
        reason=kept.reason,
        tail_text="" if isinstance(kept.stop_match, str) else choice.text.flush(),
        usage=Usage(
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.num_output,
            cached_tokens=sequence.cached_tokens or 0,
        ),
        speculation=sequence.stats,
        timing=Timing(
            queue_ms=choice.times.queue_ms,
            ttft_ms=1e3 * (choice.first_token_at - start),
            tpot_ms=1e3 * (now - choice.first_token_at) / num_after_first if num_after_first else None,
            e2e_ms=1e3 * (now - start),
        ),
        stop_match=kept.stop_match,
    )
