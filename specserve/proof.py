"""A user's own proof that speculation changes no token: the same prompts with it on and off, compared id for id.

Every prompt is asked greedily and sampled with a seed, alone and beside all others, on one engine; only the requests
differ. Each side has a prefix-cache salt of its own, so that neither reads what the other wrote (a fault in both would
not show), while what was asked alone is hit by the batch. Where the answers part, the report has the position, both
ids, and the margin between the two likeliest tokens there: in exact numerics no margin excuses a divergence, in fast
numerics a near-tie may flip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specserve.build import Built
from specserve.events import Delta, Event, Failed, Finished, SpeculationStats, Token
from specserve.request import Request, SamplingParams, SpeculationParams

# log-probability by which a token may be ahead and still lose to rounding, in nats
TIE_MARGIN = 0.05
SAMPLED_TEMPERATURE = 0.8

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "```python\ndef is_sorted(values):\n    for left, right in zip(values, values[1:]):\n",
    "SELECT name, COUNT(*) FROM orders\nExplain this query line by line and point out what is missing.",
    "Hello! I am new in town. What would you do on a rainy Sunday?",
    "My neighbour plays the trumpet at night. Write a polite note to him, and then a shorter one.",
    "Repeat the following line five times: the quick brown fox jumps over the lazy dog.",
    "one two three four one two three four one two three four one two",
    "List ten fruits, one a line, each with its colour in brackets.",
    "Name the planets in order from the sun. Then name them again in reverse order.",
    "Übersetze ins Französische: „Der Zug nach Köln fährt um 8:15 Uhr von Gleis 3 ab.“",
    "日本の首都はどこですか。 Answer in English, then in Japanese. 🗼",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"]}\nRewrite this as YAML.',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two answers part. An id is None where that answer had ended; the margin is the off run's, in nats."""

    position: int
    on_id: int | None
    off_id: int | None
    on_text: str
    off_text: str
    margin: float | None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin <= TIE_MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt under one temperature, alone or in a batch. `divergence` None = identical.

    `num_tokens` is the off run's, `speculation` the on run's.
    """

    prompt: int
    text: str
    temperature: float
    batched: bool
    num_tokens: int
    speculation: SpeculationStats
    divergence: Divergence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All comparisons, and the environment in which they were made."""

    numerics: str
    environment: str
    drafter: str
    comparisons: tuple[Comparison, ...]

    @property
    def divergent(self) -> tuple[Comparison, ...]:
        return tuple(comparison for comparison in self.comparisons if comparison.divergence is not None)

    @property
    def num_tie_flips(self) -> int:
        """Divergences where the two likeliest tokens were nearly equal."""
        return sum(1 for c in self.comparisons if c.divergence is not None and c.divergence.near_tie)

    @property
    def num_draft_tokens(self) -> int:
        return sum(comparison.speculation.num_draft_tokens for comparison in self.comparisons)

    @property
    def holds(self) -> bool:
        """Exact numerics permit no divergence; fast ones permit tie flips."""
        permitted = 0 if self.numerics == "exact" else self.num_tie_flips
        return len(self.divergent) <= permitted

    @property
    def acceptance_length(self) -> float:
        """Of all steps with a root row together, speculation on."""
        steps = sum(comparison.speculation.num_steps for comparison in self.comparisons)
        committed = sum(comparison.speculation.num_committed_tokens for comparison in self.comparisons)
        return committed / steps if steps else 1.0


@dataclass(slots=True, eq=False)
class _Answer:
    """What one request got so far."""

    tokens: list[Token] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def take(self, event: Event) -> None:
        """Raises the error of a request that failed."""
        match event:
            case Delta():
                self.tokens += event.tokens
            case Finished():
                self.stats = event.speculation
            case Failed():
                raise event.error

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def prove(
    built: Built,
    prompts: Sequence[str],
    *,
    drafter: str,
    num_draft_tokens: int | None = None,
    max_tokens: int = 64,
    seed: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Proof:
    """Compare all prompts with speculation on and off, at T = 0 and sampled, alone and batched.

    Args:
        progress: told how many of 4 × len(prompts) comparisons are done.

    Raises:
        InvalidRequest: a prompt, the drafter or a number is refused.
    """
    ids = [tuple(built.tokenizer.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    on = SpeculationParams(drafter=drafter, num_draft_tokens=num_draft_tokens)
    everyone = list(range(len(prompts)))
    found: list[Comparison] = []
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        params = [
            SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens, logprobs=2) for i in everyone
        ]
        for batched in (False, True):
            for group in [everyone] if batched else [[i] for i in everyone]:
                asked = [(ids[i], params[i]) for i in group]
                drafted = _ask(built, asked, on, "proof: on")
                plain = _ask(built, asked, SpeculationParams(drafter="off"), "proof: off")
                for i, *answers in zip(group, drafted, plain, strict=True):
                    found.append(_compare(built, i, prompts[i], temperature, batched, *answers))
                progress(len(found))
    return Proof(
        numerics=built.engine.config.numerics,
        environment=built.environment,
        drafter=drafter,
        comparisons=tuple(found),
    )


def _ask(
    built: Built,
    asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
    speculation: SpeculationParams,
    salt: str,
) -> list[_Answer]:
    """Answers of requests that are in flight together, in their order."""
    engine = built.engine
    answers = {f"proof-{i}": _Answer() for i in range(len(asked))}
    try:
        for request_id, (prompt, params) in zip(answers, asked, strict=True):
            engine.submit(
                Request(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    params=params,
                    speculation=speculation,
                    cache_salt=salt,
                )
            )
        while engine.has_work():
            for event in engine.step():
                answers[event.request_id].take(event)
    except BaseException:
        for request_id in answers:
            engine.abort(request_id)
        engine.step()
        raise
    return list(answers.values())


def _compare(
    built: Built, prompt: int, text: str, temperature: float, batched: bool, on: _Answer, off: _Answer
) -> Comparison:
    return Comparison(
        prompt=prompt,
        text=text,
        temperature=temperature,
        batched=batched,
        num_tokens=len(off.tokens),
        speculation=on.stats,
        divergence=_divergence(built, on, off),
    )


def _divergence(built: Built, on: _Answer, off: _Answer) -> Divergence | None:
    if on.ids == off.ids:
        return None
    shorter = min(len(on.ids), len(off.ids))
    position = next((i for i in range(shorter) if on.ids[i] != off.ids[i]), shorter)
    on_id, off_id = (side.ids[position] if position < len(side.ids) else None for side in (on, off))
    logprobs = off.tokens[position].logprobs if position < len(off.tokens) else None
    return Divergence(
        position=position,
        on_id=on_id,
        off_id=off_id,
        on_text="" if on_id is None else built.tokenizer.decode([on_id]),
        off_text="" if off_id is None else built.tokenizer.decode([off_id]),
        margin=None if logprobs is None else logprobs.top_logprobs[0] - logprobs.top_logprobs[1],
    )
