"""Sizes of steps that a GPU replays: rows, depth and pages are rounded up to a few sizes, one CUDA graph each.

A graph repeats launches with the shapes and addresses that it was captured with, so a step is padded up to a bucket:
rows of padding see nothing and are written nowhere. Steps that carry a chunk of a prompt and steps beyond the largest
bucket run launch by launch instead; there, the work outweighs the launches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # not yet measured
ALONE = -1  # the depth of a step in which every sequence has one row
# by depth, the fewest rows of a step of this and no smaller one; not yet measured, the last is the longest draft
DEPTHS = {ALONE: 1, 0: 2, 8: 3, 64: 11}
# tokens that the smallest bucket holds, and the step to the next; not yet measured
FIRST_CONTEXT, CONTEXT_FACTOR = 1024, 4


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One captured size: `depth` is that of the deepest node of a tree (0: chains at most), `pages` of one sequence."""

    rows: int
    depth: int
    pages: int

    @property
    def tail_slots(self) -> int:
        """How many a row has room for."""
        return max(self.depth, 0)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes, and which of their combinations exist."""

    rows: tuple[int, ...]
    depths: tuple[int, ...]
    pages: tuple[int, ...]
    known: frozenset[Bucket]

    def try_bucket(self, rows: int, depth: int, pages: int) -> Bucket | None:
        """The smallest bucket that holds such a step; None: it runs without one."""
        places = [
            bisect_left(sizes, size) for sizes, size in ((self.rows, rows), (self.depths, depth), (self.pages, pages))
        ]
        if places[0] == len(self.rows) or places[1] == len(self.depths) or places[2] == len(self.pages):
            return None
        bucket = Bucket(self.rows[places[0]], self.depths[places[1]], self.pages[places[2]])
        return bucket if bucket in self.known else None

    def largest_first(self) -> list[Bucket]:
        """In the order of capture: what the first one takes, the others find room in."""
        return sorted(self.known, reverse=True)


def make_buckets(max_rows: int, max_pages: int, page_size: int, most_rows: Callable[[int], int]) -> Buckets:
    """The buckets of an engine.

    Args:
        max_rows: rows of its largest step.
        max_pages: pages of its longest sequence.
        most_rows: how many rows attention can take in one launch if sequences have so many pages at most.
    """
    rows = tuple(size for size in ROWS if size <= max_rows)
    pages = []
    size = -(-FIRST_CONTEXT // page_size)
    while size < max_pages:
        pages.append(size)
        size *= CONTEXT_FACTOR
    pages.append(max_pages)
    known = frozenset(
        Bucket(n, depth, width)
        for width in pages
        for n in rows
        for depth, least in DEPTHS.items()
        if least <= n <= most_rows(width)
    )
    return Buckets(rows, tuple(DEPTHS), tuple(pages), known)
