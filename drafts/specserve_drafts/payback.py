"""Whether asking a costly part of `auto` pays: a head's forwards take time, and what it guesses others may guess too.

Over the steps in which it is asked, the tokens that only this part's nodes brought are set against the time that it
took: without it a step would have been that much shorter and that many tokens poorer. Where tokens a second would have
been higher without it, it rests, and is tried again after a while, ever more rarely as long as it never pays. Seconds
are known at once and tokens only after a while, so a trial ends as soon as luck cannot explain the tokens any more.
"""

from __future__ import annotations

from collections import deque
from math import inf, sqrt
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
        if self._trial_left and self._gain(hope=1.0) >= MARGIN:
            return
        if not self._trial_left and self.gain >= MARGIN:
            self._next_rest = REST
            return
        self._rest_left, self._trial_left = self._next_rest, TRIAL
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        self._steps.clear()

    @property
    def gain(self) -> float:
        """Tokens a second with the part, as a multiple of those without it; 1 where nothing is known."""
        return self._gain()

    def _gain(self, hope: float = 0.0) -> float:
        """With `hope` the part is credited with what it may have brought less by bad luck: so many standard deviations
        of a count that began with one."""
        if not self._steps:
            return 1.0
        tokens, own_tokens = sum(step.tokens for step in self._steps), sum(step.own_tokens for step in self._steps)
        seconds, own_seconds = sum(step.seconds for step in self._steps), sum(step.own_seconds for step in self._steps)
        without = (tokens - own_tokens - hope * (1 + sqrt(1 + own_tokens))) * seconds
        return tokens * (seconds - own_seconds) / without if without > 0 else inf
