"""Prompt lookup: the longest recent n-gram that occurred before is continued as it was continued then.

The longest n in [min, max] wins, and of its occurrences the latest. Each sequence keeps a table from n-gram to the
position after its latest occurrence, extended by new tokens only, so a step costs O(new tokens). Source: prompt
lookup decoding (A. Saxena, 2023), with the table instead of a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from specserve.proposal import DraftRow, DraftTree, StepResult


class _Table:
    """Where each n-gram was last followed by a token; covers n-grams that end before the last token."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.after: dict[tuple[int, ...], int] = {}
        self.covered = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in every n-gram whose next token is known by now."""
        for end in range(self.covered + 1, len(tokens)):
            for size in self.sizes:
                if size <= end:
                    self.after[tuple(tokens[end - size : end])] = end
        self.covered = max(self.covered, len(tokens) - 1)

    def match(self, tokens: Sequence[int]) -> int | None:
        """Position of the token that followed the longest matching end of `tokens`."""
        for size in self.sizes:
            if size <= len(tokens):
                found = self.after.get(tuple(tokens[len(tokens) - size :]))
                if found is not None:
                    return found
        return None


class NgramDrafter:
    """Chains copied from the sequence's own past; no model, no state shared between sequences."""

    name = "ngram"
    wants_top_ids = False

    def __init__(self, shortest: int = 1, longest: int = 4) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tables: dict[str, _Table] = {}

    def start(self, view: DraftRow) -> None:
        self._tables[view.sequence_id] = _Table(self._shortest, self._longest)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._chain(row, cap) for row, cap in zip(rows, caps, strict=True)]

    def observe(self, view: DraftRow, result: StepResult) -> None:
        """Nothing to learn: `propose` reads what was committed."""

    def stop(self, view: DraftRow) -> None:
        self._tables.pop(view.sequence_id, None)

    def _chain(self, row: DraftRow, cap: int) -> DraftTree:
        tokens, table = row.token_ids, self._tables[row.sequence_id]
        table.extend(tokens)
        start = table.match(tokens)
        if start is None:
            return DraftTree()
        # a match that reaches the end is a loop: go round it again
        period = len(tokens) - start
        return DraftTree.chain([tokens[start + i % period] for i in range(cap)], self.name)
