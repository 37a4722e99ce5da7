"""What makes the host stand between a forward and the next plan, declared, and counted step by step.

Every step waits for one thing: its drawn ids and which of its rows are finite. These features wait for more, or make
the device wait for the host. On a CPU that costs nothing extra; on a GPU it is time in which the device has no work, so
an operator should be able to see which feature asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from specserve.batch import Span
from specserve.block import SampledChain
from specserve.choice import Choice
from specserve.processors import needs_history
from specserve.request import Sequence


class Wait(StrEnum):
    """A feature that synchronises. Adding one means adding it here."""

    HOST_DRAFTER = "host_drafter"  # trees are grown on the host, those of a model from scores read level by level
    TOP_IDS = "top_ids"  # a drafter learns from the largest logits of every row
    SAMPLED = "sampled"  # rows drawn with noise are a launch of their own after the forward, with its own answer
    BLOCK = "block"  # block verification tests the rows of its chain on the host
    GRAMMAR = "grammar"  # masks are made on the host and applied to logits there
    PENALTIES = "penalties"  # penalties, bias, bad words and allowed ids count prefixes on the host
    MIN_TOKENS = "min_tokens"  # ids that would end the answer are taken out of logits on the host
    LOGPROBS = "logprobs"  # rows of logits are read
    STOP_STRINGS = "stop_strings"  # text is made and searched before the next plan, which needs to know who goes on
    PROMPT_LOGPROBS = "prompt_logprobs"  # rows of logits of the whole prompt are read


def waits_in(spans: Iterable[Span], choice_of: Callable[[Sequence], Choice]) -> set[Wait]:
    """Those of one step."""
    found = set()
    for span in spans:
        choice = choice_of(span.sequence)
        if span.tree.token_ids:
            found.add(Wait.HOST_DRAFTER)
        if not choice.plain or choice.text.searches or span.prompt_logit is not None:
            found |= _waits_of(span, choice)
    return found


def _waits_of(span: Span, choice: Choice) -> set[Wait]:
    """Those of one sequence, its drafter's apart."""
    found = set()
    if span.prompt_logit is not None:
        found.add(Wait.PROMPT_LOGPROBS)
    if span.draws and choice.text.searches:
        found.add(Wait.STOP_STRINGS)
    if not span.draws or choice.plain:
        return found
    params = span.sequence.request.params
    asked = {
        Wait.SAMPLED: not params.greedy,
        Wait.BLOCK: isinstance(span.tree, SampledChain) and bool(span.tree.token_ids),
        Wait.GRAMMAR: choice.grammar is not None,
        Wait.PENALTIES: needs_history(span.sequence.request),
        Wait.MIN_TOKENS: len(span.sequence.token_ids) - span.sequence.prompt_len < params.min_tokens,
        Wait.LOGPROBS: params.logprobs is not None,
    }
    return found | {wait for wait, needed in asked.items() if needed}
