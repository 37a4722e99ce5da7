"""One answer in the making: what the engine keeps of a choice beside its sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specserve.answertext import AnswerText
from specserve.grammar import Grammar, GrammarState
from specserve.processors import History, needs_history
from specserve.request import Sequence


@dataclass(slots=True)
class Times:
    """When a request was submitted and first planned, in engine seconds; shared by its choices."""

    submitted_at: float
    planned_at: float | None = None

    def plan(self, now: float) -> None:
        if self.planned_at is None:
            self.planned_at = now

    @property
    def queue_ms(self) -> float:
        return 0.0 if self.planned_at is None else 1e3 * (self.planned_at - self.submitted_at)


@dataclass(eq=False)
class Choice:
    """One answer in the making."""

    sequence: Sequence
    text: AnswerText
    stops: frozenset[int]
    times: Times
    history: History | None = None
    grammar: GrammarState | None = None
    first_token_at: float | None = None

    @cached_property
    def plain(self) -> bool:
        """Greedy, with nothing that changes or reports logits: the largest raw logit is the token."""
        params = self.sequence.request.params
        return params.greedy and self.history is None and params.logprobs is None and not params.min_tokens


def open_choice(
    sequence: Sequence, text: AnswerText, stops: frozenset[int], times: Times, grammar: Grammar | None
) -> Choice:
    """A choice at its start; `sequence` may carry a prompt only, or be a fork that has no token yet."""
    request = sequence.request
    return Choice(
        sequence=sequence,
        text=text,
        stops=stops,
        times=times,
        history=History(request, sequence.token_ids) if grammar is not None or needs_history(request) else None,
        grammar=None if grammar is None else grammar.start(),
    )
