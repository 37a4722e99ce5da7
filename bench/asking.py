"""Requests of the benches that run an engine in this process: greedy, of a fixed length, none named as another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specserve.build import Built
from specserve.request import Request, SamplingParams, SpeculationParams

_numbers = itertools.count()


def fresh_salt() -> str:
    """A cache salt that no other request has."""
    return f"bench {next(_numbers)}"


def greedy_request(prompt: Sequence[int], drafter: str, num_tokens: int, *, salt: str, now: float) -> Request:
    """An answer of exactly `num_tokens`; `now` is the engine's time."""
    return Request(
        request_id=f"bench-{next(_numbers)}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        speculation=SpeculationParams(drafter=drafter),
        cache_salt=salt,
        arrival_time=now,
    )


def submit_alone(built: Built, prompt: Sequence[int], drafter: str, num_tokens: int) -> Request:
    """Hand the engine a request that shares nothing with others."""
    request = greedy_request(prompt, drafter, num_tokens, salt=fresh_salt(), now=built.engine.clock())
    built.engine.submit(request)
    return request


def chat_ids(built: Built, text: str) -> list[int]:
    """A text as a user's first message."""
    return list(built.tokenizer.encode_chat([{"role": "user", "content": text}]))
