"""The paged pool: which page holds which slots of which sequence, and nothing about tensors.

A page id names a slice of every registered layer group. Pages are counted by holders (tables and prefix-index
entries); a page with no holder is on the free list, last in first out. A sequence's slots are intervals:

    [0, cached_len)             committed; full pages may be shared; never written again after compaction
    [cached_len, reserved_len)  this step's rows; writable by this table alone
    [reserved_len, held pages)  promised to an admitted prompt, not readable

Rollback is dropping: `commit` keeps the accepted path, returns the slot moves that bring it together, and lets
the pages past it go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.errors import PoolExhausted


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one slot; source and target are pool-wide slots, page * page_size + offset."""

    source: int
    target: int


class PagePool:
    """`num_pages` pages of `page_size` tokens. Knows every live table, so that `check` can recount."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages is {num_pages}, page_size is {page_size}; both must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.holders = [0] * num_pages
        self.indexed: set[int] = set()
        self.tables: set[PageTable] = set()
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix index holds."""
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size)

    def take(self) -> int:
        """A free page, held once.

        Raises:
            PoolExhausted: no page is free; callers look at `num_free` first.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.num_pages} pages are held")
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        self._num_cached -= self._only_indexed(page)
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        self._num_cached -= self._only_indexed(page)
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)
        self._num_cached += self._only_indexed(page)

    def enter_index(self, page: int) -> None:
        """The prefix index becomes a holder."""
        self.indexed.add(page)
        self.holders[page] += 1
        self._num_cached += self._only_indexed(page)

    def leave_index(self, page: int) -> None:
        self._num_cached -= self._only_indexed(page)
        self.indexed.remove(page)
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)

    def _only_indexed(self, page: int) -> int:
        return int(self.holders[page] == 1 and page in self.indexed)

    def check(self) -> None:
        """Recount everything; raises AssertionError with the numbers when a conservation law is broken."""
        count = [0] * self.num_pages
        for table in self.tables:
            for page in table.pages:
                count[page] += 1
        held_by_tables = sum(1 for n in count if n)
        for page in self.indexed:
            count[page] += 1
        wrong = [(p, self.holders[p], n) for p, n in enumerate(count) if self.holders[p] != n]
        if wrong:
            raise AssertionError(f"(page, holders kept, holders found): {wrong}")
        if len(set(self._free)) != len(self._free) or any(count[page] for page in self._free):
            raise AssertionError("the free list holds a page twice, or one that is held")
        cached = sum(1 for page in self.indexed if count[page] == 1)
        if cached != self._num_cached:
            raise AssertionError(f"{cached} pages are cached, {self._num_cached} were counted")
        if self.num_free + held_by_tables + cached != self.num_pages:
            raise AssertionError(
                f"free {self.num_free} + referenced {held_by_tables} + cached {cached} != {self.num_pages}"
            )
        for table in self.tables:
            for page in table.writable_pages():
                if count[page] != 1:
                    raise AssertionError(f"page {page} is writable and has {count[page]} holders")


class PageTable:
    """The pages of one sequence, in slot order; `keys` are the prefix keys of its full pages, as far as computed."""

    __slots__ = ("cached_len", "keys", "pages", "pool", "promised_len", "reserved_len")

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.keys: list[bytes] = []
        self.cached_len = 0
        self.reserved_len = 0
        self.promised_len = 0
        pool.tables.add(self)

    def slot(self, index: int) -> int:
        """Pool-wide slot of this sequence's slot `index`."""
        size = self.pool.page_size
        return self.pages[index // size] * size + index % size

    def slots(self, start: int, count: int) -> list[int]:
        """Pool-wide slots of this sequence's slots [start, start + count)."""
        size, pages = self.pool.page_size, self.pages
        return [pages[index // size] * size + index % size for index in range(start, start + count)]

    def adopt(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Start an empty table from a prefix hit of whole pages."""
        for page in pages:
            self.pool.hold(page)
        self.pages.extend(pages)
        self.keys.extend(keys)
        self.cached_len = self.reserved_len = len(pages) * self.pool.page_size

    def pages_to_reserve(self, num_slots: int) -> int:
        """How many pages `reserve(num_slots)` would take from the pool, a shared tail's copy included."""
        missing = self.pool.pages_for(self.cached_len + num_slots) - len(self.pages)
        return max(missing, 0) + int(self._tail_is_shared())

    def try_reserve(self, num_slots: int) -> list[Move] | None:
        """Make [cached_len, cached_len + num_slots) writable; None, and nothing changed, when pages lack.

        Returns:
            The copies to apply before anything is written: the committed slots of a shared tail page.
        """
        if self.pages_to_reserve(num_slots) > self.pool.num_free:
            return None
        copies = self._copy_shared_tail() if self._tail_is_shared() else []
        while len(self.pages) < self.pool.pages_for(self.cached_len + num_slots):
            self.pages.append(self.pool.take())
        self.reserved_len = max(self.reserved_len, self.cached_len + num_slots)
        return copies

    def promise(self, num_slots: int) -> None:
        """Keep pages for slots [0, num_slots) through `commit`: a prompt is admitted as a whole."""
        self.promised_len = num_slots

    def commit(self, num_pending: int, path: Sequence[int] = ()) -> list[Move]:
        """Keep the pending rows and the accepted path; drop pages past them and past the promise.

        Args:
            num_pending: rows of known tokens, written from slot `cached_len` on.
            path: row numbers of the accepted nodes, ascending; row j was written to slot `cached_len + j`.

        Returns:
            Compaction moves, to be applied directly, target layers only; no two share a target.
        """
        first = self.cached_len
        start = first + num_pending
        moves = [
            Move(self.slot(first + row), self.slot(start + i)) for i, row in enumerate(path) if first + row != start + i
        ]
        self.cached_len = self.reserved_len = start + len(path)
        keep = self.pool.pages_for(max(self.cached_len, self.promised_len))
        while len(self.pages) > keep:
            self.pool.drop(self.pages.pop())
        return moves

    def fork(self) -> PageTable:
        """A table that shares all committed pages, never reserved ones."""
        child = PageTable(self.pool)
        child.pages = self.pages[: self.pool.pages_for(self.cached_len)]
        child.keys = list(self.keys)
        child.cached_len = child.reserved_len = self.cached_len
        for page in child.pages:
            self.pool.hold(page)
        return child

    def release(self) -> None:
        """Let every page go; the table stays usable and empty, and `check` no longer counts it."""
        while self.pages:
            self.pool.drop(self.pages.pop())
        self.keys.clear()
        self.cached_len = self.reserved_len = self.promised_len = 0
        self.pool.tables.discard(self)

    def reopen(self) -> None:
        """Count a released table again, before it adopts or reserves."""
        self.pool.tables.add(self)

    def writable_pages(self) -> list[int]:
        """Pages of [cached_len, reserved_len)."""
        if self.reserved_len <= self.cached_len:
            return []
        size = self.pool.page_size
        return self.pages[self.cached_len // size : self.pool.pages_for(self.reserved_len)]

    def _tail_is_shared(self) -> bool:
        size = self.pool.page_size
        if self.cached_len % size == 0:
            return False
        return self.pool.holders[self.pages[self.cached_len // size]] > 1

    def _copy_shared_tail(self) -> list[Move]:
        size = self.pool.page_size
        index = self.cached_len // size
        old, new = self.pages[index], self.pool.take()
        self.pages[index] = new
        self.pool.drop(old)
        return [Move(old * size + i, new * size + i) for i in range(self.cached_len % size)]
