"""Prompt lookup: the longest recent n-gram that occurred before is continued as it was continued then.

The longest n in [min, max] wins, and of its occurrences the latest. Each sequence keeps a table from n-gram to the
position after its latest occurrence, extended by new tokens only, so a step costs O(new tokens). Source: prompt
lookup decoding (A. Saxena, 2023), with the table instead of a scan. How surely a node survives is estimated from
how often chains from n-grams of that length got so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.pasts import NO_DRAFT, Draft
from specserve_drafts.record import Record

# Deeper nodes are as sure as this one, given that all before them were accepted.
_DEEPEST = 8


class _Table:
    """Where each n-gram was last followed by a token; covers n-grams that end before the last token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}
        self.covered = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in every n-gram whose next token is known by now."""
        for end in range(self.covered + 1, len(tokens)):
            window = tuple(tokens[max(end - self.sizes.start, 0) : end])
            for size in self.sizes:
                if size <= end:
                    self.after[window[-size:]] = end
        self.covered = max(self.covered, len(tokens) - 1)

    def match(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Size of the longest matching end of `tokens`, and position of the token that followed it."""
        window = tuple(tokens[-self.sizes.start :])
        for size in self.sizes:
            if size <= len(tokens):
                found = self.after.get(window[-size:])
                if found is not None:
                    return size, found
        return None


def _prior(size: int, depth: int) -> float:
    """Chance of a node whose ancestors are right: the match has grown by them (greedy answers of the demo model)."""
    return 1.0 - 0.85 / (size + depth - 1)


class NgramDrafter:
    """Chains copied from the sequence's own past; no model, no text shared between sequences."""

    name = "ngram"
    wants_top_ids = False

    def __init__(self, shortest: int = 1, longest: int = 4) -> None:
        self._shortest = shortest
        self._longest = longest
        self._record = Record()
        self._tables: dict[str, _Table] = {}
        self._drafts: dict[str, Draft] = {}

    def start(self, view: DraftRow) -> None:
        self._tables[view.sequence_id] = _Table(self._shortest, self._longest)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._draft(row, cap).tree for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        draft = self._drafts.pop(view.sequence_id, None)
        if draft is not None:
            draft.learn(self._record, result.tokens)

    def stop(self, view: DraftRow) -> None:
        self._drafts.pop(view.sequence_id, None)
        self._tables.pop(view.sequence_id, None)

    def _draft(self, row: DraftRow, cap: int) -> Draft:
        tokens, table = row.token_ids, self._tables[row.sequence_id]
        table.extend(tokens)
        match = table.match(tokens)
        if match is None:
            return NO_DRAFT
        size, start = match
        # a match that reaches the end is a loop: go round it again
        period = len(tokens) - start
        token_ids = [tokens[start + i % period] for i in range(cap)]
        greedy = row.temperature < GREEDY_TEMPERATURE
        kinds = tuple((greedy, size, min(depth, _DEEPEST)) for depth in range(1, cap + 1))
        survival: list[float] = []
        for depth, kind in enumerate(kinds, 1):
            above = survival[-1] if survival else 1.0
            survival.append(above * self._record.estimate(kind, _prior(size, depth)))
        draft = Draft(DraftTree.chain(token_ids, self.name, survival), kinds)
        self._drafts[row.sequence_id] = draft
        return draft
