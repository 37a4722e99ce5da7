"""Predicted outputs: the caller expects certain tokens in the answer, in order, and they are drafted as they come.

While the answer follows the prediction, what comes next in it is drafted. Where they part, the answer may have
replaced something, put something in, or left something out; until it is clear where it goes on, the draft is a tree
over these cases: as many tokens further on, at the same place, and wherever the last few tokens occur in the
prediction, near places before far ones. How such cases become a tree is in specserve_drafts/pasts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.occurrences import LONGEST, SEPARATOR, Text
from specserve_drafts.pasts import ENDLESS, NO_DRAFT, Draft, Past, grow
from specserve_drafts.record import Record

# Tuned on answers of the demo model against copies with replaced, inserted and removed tokens.
_FIRST_MATCH = 4  # an answer is expected to begin as predicted as surely as after so many matching tokens
_SURE_MATCH = 4  # so many tokens that match settle where the answer goes on
_MAX_APART = 8  # tokens after which "replaced" and "put in" are given up
_NEAR = 32  # tokens beyond where they parted among which even a single match counts
_MAX_FAR = 8  # longer matches asked for anywhere

_FOLLOWED, _CASE, _FOUND = 1, 2, 4


class _Alignment:
    """Where in the prediction an answer is.

    `place` is the next expected token. `matched` tokens agreed before it; since they parted, `apart` tokens came.
    """

    def __init__(self, prediction: Sequence[int], answer_start: int) -> None:
        self._text = Text()
        self._text.extend([*prediction, SEPARATOR])
        self._answer_start = answer_start
        self._seen = answer_start
        self._place = 0
        self._matched = _FIRST_MATCH
        self._apart = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what was committed since the last time."""
        expected = self._text.tokens
        for token_id in tokens[self._seen :]:
            if not self._apart and expected[self._place] == token_id:
                self._place += 1
                self._matched += 1
            else:
                self._apart += 1
        self._seen = len(tokens)

    def pasts(self, tokens: Sequence[int]) -> list[Past]:
        """What may come next; `tokens` is the sequence that was followed."""
        expected = self._text.tokens
        places = self._places(tokens) if self._apart else {}
        sure = [place for place, length in places.items() if length >= _SURE_MATCH]
        if sure:
            self._place = max(sure, key=lambda place: (places[place], -abs(place - self._place)))
            self._matched, self._apart = places[self._place], 0
        if not self._apart:
            return [Past(expected, self._place, ENDLESS, min(self._matched, LONGEST), 1.0, _FOLLOWED)]
        pasts = {place: Past(expected, place, ENDLESS, length, 1.0, _FOUND) for place, length in places.items()}
        if self._apart <= _MAX_APART:
            for place in (self._place, min(self._place + self._apart, len(expected) - 1)):
                pasts.setdefault(place, Past(expected, place, ENDLESS, 1, 1.0, _CASE))
        return list(pasts.values())

    def _places(self, tokens: Sequence[int]) -> dict[int, int]:
        """Where the last tokens of the answer occur: index of what follows → tokens that match."""
        answer = tokens[max(self._answer_start, len(tokens) - LONGEST) :]
        places = dict(self._text.occurrences(answer, _MAX_FAR))
        near = self._text.tokens[self._place : self._place + min(self._apart, _NEAR) + _NEAR]
        for place, token_id in enumerate(near, self._place + 1):
            if token_id == answer[-1]:
                places.setdefault(place, 1)
        return places


class PredictionDrafter:
    """Drafts from `DraftRow.prediction`; silent for requests without one, and when the prediction is used up."""

    name = "prediction"
    wants_top_ids = False

    def __init__(self) -> None:
        self._record = Record()
        self._alignments: dict[str, _Alignment] = {}
        self._drafts: dict[str, Draft] = {}

    def start(self, view: DraftRow) -> None:
        if view.prediction:
            self._alignments[view.sequence_id] = _Alignment(view.prediction, view.prompt_len)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._draft(row, cap).tree for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        draft = self._drafts.pop(view.sequence_id, None)
        if draft is not None:
            draft.learn(self._record, result.tokens)

    def stop(self, view: DraftRow) -> None:
        self._drafts.pop(view.sequence_id, None)
        self._alignments.pop(view.sequence_id, None)

    def _draft(self, row: DraftRow, cap: int) -> Draft:
        alignment = self._alignments.get(row.sequence_id)
        if alignment is None:
            return NO_DRAFT
        alignment.follow(row.token_ids)
        greedy = row.temperature < GREEDY_TEMPERATURE
        draft = grow(alignment.pasts(row.token_ids), cap, self._record, greedy, self.name)
        self._drafts[row.sequence_id] = draft
        return draft
