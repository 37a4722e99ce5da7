"""What is kept of one answer: its ids, its counts, and one entry for every step that had a root row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specserve.events import FinishReason, SpeculationStats
from specserve.proposal import DraftTree

OFF = "off"

# An answer loops if its last LOOP_WINDOW tokens repeat with a period of at most LOOP_PERIOD: three rounds or more.
LOOP_WINDOW = 48
LOOP_PERIOD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to answer: a drafter by name. `cold`: whatever it shares between requests is empty for every prompt."""

    drafter: str
    cold: bool = False

    @property
    def label(self) -> str:
        return f"{self.drafter}, cold" if self.cold else self.drafter


PLAIN = Side(drafter=OFF)


class Step(NamedTuple):
    """One step of one answer, alone in the engine. Seconds of the whole step, of the drafter, of forward and draws."""

    num_rows: int
    num_drafted: int
    num_accepted: int
    num_committed: int
    seconds: float
    draft_seconds: float
    verify_seconds: float


class Draft(NamedTuple):
    """What became of a tree that was asked for with room for `cap` nodes: `path` are the accepted nodes, in order."""

    cap: int
    tree: DraftTree
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt, answered by one side. `num_decoded` tokens came in `decode_seconds`, the first one apart.

    `steps` and `drafts` are what an engine in this process shows of itself; a server tells neither. The drafter was
    asked in `num_asked` of the steps, and had nothing to say in `num_unmatched`. An answer's last draft is not told.
    """

    prompt: str
    category: str
    side: Side
    token_ids: tuple[int, ...]
    reason: FinishReason
    stats: SpeculationStats
    decode_seconds: float
    num_decoded: int
    steps: tuple[Step, ...] = ()
    drafts: tuple[Draft, ...] = ()
    num_asked: int = 0
    num_unmatched: int = 0

    @property
    def loops(self) -> bool:
        return loops(self.token_ids)


def loops(token_ids: Sequence[int]) -> bool:
    """Whether an answer ends in a loop, which flatters every drafter that looks at the text."""
    tail = token_ids[-LOOP_WINDOW:]
    if len(tail) < LOOP_WINDOW:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


def prompt_name(text: str) -> str:
    """A name that a prompt has in every result, whatever its place in a file was."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
