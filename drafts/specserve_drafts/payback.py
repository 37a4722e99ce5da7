"""Whether asking a costly part of `auto` pays: a head's forwards take time, and what it guesses others may guess too.

Over the steps in which it is asked, the tokens that only this part's nodes brought are set against the time that it
took: without it a step would have been that much shorter and that many tokens poorer. Where tokens a second would have
been higher without it, it rests, and is tried again after a while, ever more rarely as long as it never pays.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

WINDOW = 64  # steps that are judged together
TRIAL = 24  # steps asked before the first judgement, and after each rest
REST, LONGEST_REST = 256, 8192  # steps
MARGIN = 1.01  # asking must promise so much more than not asking


class Asked(NamedTuple):
    """One step in which the part was asked: its tokens and seconds, and the part's share of both."""

    tokens: int
    seconds: float
    own_tokens: int
    own_seconds: float


class Payback:
    """Follows one part. `asks` is called once a step, `count` once for each step that it was asked in."""

    def __init__(self) -> None:
        self._steps: deque[Asked] = deque(maxlen=WINDOW)
        self._trial_left = TRIAL
        self._rest_left = 0
        self._next_rest = REST

    @property
    def rests(self) -> bool:
        """Whether it was found not to pay."""
        return self._rest_left > 0

    def asks(self) -> bool:
        """Whether the part is to be asked in this step."""
        self._rest_left = max(self._rest_left - 1, 0)
        return not self._rest_left

    def count(self, asked: Asked) -> None:
        """A step that began and ended with the same sequences; others tell nothing of its seconds."""
        self._steps.append(asked)
        self._trial_left = max(self._trial_left - 1, 0)
        if self._trial_left:
            return
        if self.gain >= MARGIN:
            self._next_rest = REST
            return
        self._rest_left, self._trial_left = self._next_rest, TRIAL
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self._steps.clear()

    @property
    def gain(self) -> float:
        """Tokens a second with the part, as a multiple of those without it; 1 where nothing is known."""
        tokens, seconds, own_tokens, own_seconds = map(sum, zip(*self._steps, strict=True)) if self._steps else (0,) * 4
        with_it, without = tokens * (seconds - own_seconds), (tokens - own_tokens) * seconds
        return with_it / without if without > 0 else 1.0
