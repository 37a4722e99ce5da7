"""Suffix drafting: what was just said occurred before, in this request or in an earlier answer; say the same again.

The index is in specserve_drafts/occurrences.py, the vote on what comes next in specserve_drafts/pasts.py. Source:
SuffixDecoding (Oliaro et al., 2024). It keeps suffix trees; chains of grams find the same places, and can forget their
oldest tokens, so that the store of earlier answers stays bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.occurrences import SEPARATOR, OwnText, Text
from specserve_drafts.pasts import ENDLESS, Draft, Past, grow
from specserve_drafts.record import Record

# Bounds of all stored answers together; a token costs about 170 bytes (measured).
MAX_STORED_TOKENS = 1 << 19
MAX_SALTS = 1024

# How many tokens of the prompt's end are stored before an answer, so that its beginning can be recognised.
_LEAD = 4

# How many places in either text are asked; twice as many change nothing (measured).
_MAX_PASTS = 8

# A match in another answer is worth that much of the same match in the own text (fitted as _VOTE was).
_STORE_TRUST = 0.15

_OWN, _STORE = 1, 2


class PastAnswers:
    """Ended answers per salt, oldest dropped first: one tenant's answers are never looked up for another."""

    def __init__(self, max_tokens: int = MAX_STORED_TOKENS, max_salts: int = MAX_SALTS) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._max_salts = max_salts
        self._texts: dict[str, Text] = {}
        self._ages: deque[tuple[str, int]] = deque()  # (salt, tokens), oldest first

    def of(self, salt: str) -> Text | None:
        return self._texts.get(salt)

    def add(self, salt: str, tokens: Sequence[int]) -> None:
        """Keep one answer for requests of the same salt; without a salt nothing is kept."""
        if not salt:
            return
        tokens = [*tokens[-self._max_tokens + 1 :], SEPARATOR]
        self._texts.setdefault(salt, Text((4, 2))).extend(tokens)
        self._ages.append((salt, len(tokens)))
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens or len(self._texts) > self._max_salts:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        salt, count = self._ages.popleft()
        self.num_tokens -= count
        self._texts[salt].drop(count)
        if not self._texts[salt].tokens:
            del self._texts[salt]


class SuffixDrafter:
    """Trees copied from the sequence's own past and from earlier answers of the same salt; no model."""

    name = "suffix"
    wants_top_ids = False

    def __init__(self) -> None:
        self.answers = PastAnswers()
        self._record = Record()
        self._texts: dict[str, OwnText] = {}
        self._drafts: dict[str, Draft] = {}

    def start(self, view: DraftRow) -> None:
        self._texts[view.sequence_id] = OwnText()

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._draft(row, cap) for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        draft = self._drafts.pop(view.sequence_id, None)
        if draft is not None:
            draft.learn(self._record, result.tokens)

    def stop(self, view: DraftRow) -> None:
        self._drafts.pop(view.sequence_id, None)
        if self._texts.pop(view.sequence_id, None) is not None:
            self.answers.add(view.salt, view.token_ids[max(view.prompt_len - _LEAD, 0) :])

    def _draft(self, row: DraftRow, cap: int) -> DraftTree:
        draft = grow(self._pasts(row), cap, self._record, row.temperature < GREEDY_TEMPERATURE, self.name)
        self._drafts[row.sequence_id] = draft
        return draft.tree

    def _pasts(self, row: DraftRow) -> list[Past]:
        own, present = row.token_ids, len(row.token_ids)
        places = self._texts[row.sequence_id].occurrences(own, _MAX_PASTS)
        pasts = [Past(own, start, present - start, length, 1.0, _OWN) for start, length in places]
        earlier = self.answers.of(row.salt)
        if earlier is not None:
            pasts += [
                Past(earlier.tokens, start, ENDLESS, length, _STORE_TRUST, _STORE)
                for start, length in earlier.occurrences(own, _MAX_PASTS)
            ]
        return pasts
