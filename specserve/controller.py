"""How many nodes each running sequence may draft. For now a fixed number: the request's, else the engine's.

Pure policy: whatever it answers, the drawn tokens are the same (coupled verification); only time is at stake.
"""

from __future__ import annotations

from specserve.config import SpeculationConfig
from specserve.request import Sequence


def drafter_of(sequence: Sequence, config: SpeculationConfig) -> str:
    """The drafter that guesses for this sequence; `auto` is the n-gram drafter."""
    name = sequence.request.speculation.drafter or config.drafter
    return "ngram" if name == "auto" else name


def budget(sequence: Sequence, config: SpeculationConfig) -> int:
    """Node cap of the sequence's next tree; 0 = its drafter is not called."""
    if drafter_of(sequence, config) == "off":
        return 0
    wanted = sequence.request.speculation.num_draft_tokens
    return config.num_draft_tokens if wanted is None else wanted


def inactive_reason(sequence: Sequence, config: SpeculationConfig) -> str:
    """Why a finished sequence verified no draft at all, when nothing went wrong."""
    drafter = drafter_of(sequence, config)
    if drafter == "off":
        return "speculation is off"
    if not budget(sequence, config):
        return "num_draft_tokens is 0"
    if not sequence.stats.num_steps:
        return "the answer ended with its first token"
    if not sequence.num_asked:
        return "there was never room to draft: the answer's end, pages or the token budget were too near"
    return f"drafter {drafter!r} proposed nothing"
