"""The second half of a commit: what was committed becomes text and events.

The next plan needs none of it, so on a device that computes by itself it is made while the next forward runs. Commits
of a choice are published in their order: its text is decoded token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from specserve.choice import Choice
from specserve.commit import Cut
from specserve.events import Delta, Finished, Started, Timing, Token, TokenLogprobs, Usage


class Committed(NamedTuple):
    """What a step kept for one choice; the first `num_drafted` tokens were drafts. `time` is the engine's."""

    choice: Choice
    kept: Cut
    num_drafted: int
    logprobs: SequenceOf[TokenLogprobs] | None
    time: float


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


def publish(committed: Committed) -> Iterator[Delta | Finished]:
    """The events of a commit."""
    choice, kept, time = committed.choice, committed.kept, committed.time
    if choice.first_token_at is None:
        choice.first_token_at = time
    texts = choice.text.push_all(kept.token_ids) if kept.texts is None else kept.texts
    count, num_drafted = len(texts), committed.num_drafted
    drafted = (True,) * num_drafted + (False,) * (count - num_drafted)
    tokens = tuple(map(Token, kept.token_ids, texts, drafted, committed.logprobs or (None,) * count))
    sequence = choice.sequence
    yield Delta(request_id=sequence.request.request_id, index=sequence.choice, tokens=tokens, time=time)
    if kept.reason is not None:
        yield _finished(choice, kept, choice.first_token_at, time)


def _finished(choice: Choice, kept: Cut, first_token_at: float, now: float) -> Finished:
    """The last event of a choice; text that is still held comes out unless a stop string claimed it."""
    assert kept.reason is not None
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
            ttft_ms=1e3 * (first_token_at - start),
            tpot_ms=1e3 * (now - first_token_at) / num_after_first if num_after_first else None,
            e2e_ms=1e3 * (now - start),
        ),
        stop_match=kept.stop_match,
    )
