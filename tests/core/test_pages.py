"""The page pool and its tables, with the worked example of docs/architecture.md."""

from __future__ import annotations

import pytest

from specserve.errors import PoolExhausted
from specserve.pages import Move, PagePool, PageTable


def moves(table: PageTable, pairs: list[tuple[int, int]]) -> list[Move]:
    return [Move(table.slot(a), table.slot(b)) for a, b in pairs]


def test_worked_example() -> None:
    pool = PagePool(num_pages=4, page_size=16)
    table = PageTable(pool)
    assert table.try_reserve(12) == [] and table.commit(12) == []
    assert table.try_reserve(8) == [] and table.commit(8) == []
    assert table.cached_len == 20 and len(table.pages) == 2
    # root in slot 20, nodes in 21, 22, 23; the path is rows 2 and 3
    assert table.try_reserve(4) == []
    expected = moves(table, [(22, 21), (23, 22)])
    assert table.commit(1, [2, 3]) == expected
    assert table.cached_len == 23
    pool.check()


def test_commit_drops_pages_past_the_path_but_keeps_what_was_promised() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    table = PageTable(pool)
    table.try_reserve(3)
    table.commit(3)
    table.try_reserve(1 + 8)
    assert pool.num_free == 1
    assert table.commit(1, []) == []
    assert pool.num_free == 3 and table.cached_len == 4
    table.release()
    table.reopen()
    table.promise(9)
    table.try_reserve(9)
    table.commit(4)
    assert len(table.pages) == 3


def test_a_path_that_is_a_prefix_of_the_rows_moves_nothing() -> None:
    table = PageTable(PagePool(2, 8))
    table.try_reserve(5)
    assert table.commit(1, [1, 2]) == []


def test_fork_shares_committed_pages_only_and_the_first_writer_copies_the_tail() -> None:
    pool = PagePool(num_pages=6, page_size=4)
    parent = PageTable(pool)
    parent.try_reserve(6)
    parent.commit(6)
    parent.try_reserve(1 + 4)
    child = parent.fork()
    assert child.pages == parent.pages[:2] and child.reserved_len == 6
    with pytest.raises(AssertionError, match="writable"):
        pool.check()  # a fork inside a step: the parent's reserved tail is now shared
    parent.commit(1, [])
    old_tail = child.pages[1]
    copies = child.try_reserve(1)
    assert copies == [Move(old_tail * 4, child.pages[1] * 4), Move(old_tail * 4 + 1, child.pages[1] * 4 + 1)]
    assert parent.pages[1] == old_tail and parent.try_reserve(1) == []  # the last one writes in place
    pool.check()


def test_reserve_takes_all_or_nothing() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    table = PageTable(pool)
    assert table.try_reserve(9) is None
    assert pool.num_free == 2 and table.pages == []
    pool.take()
    pool.take()
    with pytest.raises(PoolExhausted, match="all 2 pages"):
        pool.take()


def test_the_free_list_is_last_in_first_out() -> None:
    pool = PagePool(3, 4)
    first, second = pool.take(), pool.take()
    pool.drop(first)
    pool.drop(second)
    assert pool.take() == second


def test_check_notices_a_lost_page_and_a_stray_holder() -> None:
    pool = PagePool(3, 4)
    pool.take()
    with pytest.raises(AssertionError, match="holders"):
        pool.check()
    pool = PagePool(3, 4)
    table = PageTable(pool)
    table.try_reserve(4)
    pool.drop(table.pages[0])
    with pytest.raises(AssertionError):
        pool.check()
