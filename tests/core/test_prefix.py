"""The prefix index: what is hit, what stays, what is evicted first."""

from __future__ import annotations

from specserve.pages import PagePool, PageTable
from specserve.prefix import PrefixIndex, page_key, root_key


def filled(pool: PagePool, num_slots: int) -> PageTable:
    table = PageTable(pool)
    assert table.try_reserve(num_slots) is not None
    table.commit(num_slots)
    return table


def test_a_hit_covers_whole_pages_and_leaves_a_token_to_compute() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    tokens = list(range(12))
    table = filled(pool, 12)
    index.publish(table, tokens, "")
    assert index.match(tokens, "")[1] == table.pages[:2]  # 11 tokens at most: two pages
    assert index.match([*tokens, 99], "")[1] == table.pages
    assert index.match(tokens[:5], "")[1] == table.pages[:1]
    assert index.match(tokens[:4], "")[1] == []
    assert index.match([7, *tokens[1:]], "")[1] == []


def test_salts_do_not_see_each_other_and_keys_chain() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    table = filled(pool, 8)
    index.publish(table, list(range(8)), "tenant")
    assert index.match(list(range(9)), "")[1] == []
    assert index.match(list(range(9)), "tenant")[1] == table.pages
    assert root_key("a") != root_key("ab")
    assert page_key(root_key("a"), [1, 2]) != page_key(root_key("a"), [2, 1])


def test_the_first_page_stays_and_a_duplicate_belongs_to_its_table() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    tokens = list(range(9))
    first, second = filled(pool, 8), filled(pool, 8)
    index.publish(first, tokens, "")
    index.publish(second, tokens, "")
    assert index.match(tokens, "")[1] == first.pages
    second.release()
    assert pool.num_free == 6
    pool.check()
    index.check()


def test_a_duplicate_enters_when_the_first_one_is_gone() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    tokens = list(range(13))
    first, second = filled(pool, 4), filled(pool, 4)
    index.publish(first, tokens, "")
    index.publish(second, tokens, "")
    first.release()
    assert index.evict(8) == 1
    second.try_reserve(4)
    second.commit(4)
    index.publish(second, tokens, "")
    assert index.match(tokens, "")[1] == second.pages
    index.check()


def test_eviction_takes_leaves_first_and_the_least_recently_used() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    long, short = filled(pool, 12), filled(pool, 4)
    index.publish(long, list(range(12)), "")
    index.publish(short, list(range(50, 54)), "")
    keys, _ = index.match(list(range(13)), "")
    index.touch(keys)
    pages = list(long.pages)
    long.release()
    short.release()
    assert pool.num_cached == 4
    assert index.evict(1) == 1
    assert index.match([*range(50, 54), 0], "")[1] == []
    assert index.evict(1) == 1
    assert index.match(list(range(13)), "")[1] == pages[:2]
    assert index.evict(99) == 2
    assert pool.num_free == 8 and len(index) == 0


def test_pages_in_use_are_not_evicted() -> None:
    pool = PagePool(4, 4)
    index = PrefixIndex(pool)
    table = filled(pool, 8)
    index.publish(table, list(range(8)), "")
    assert index.evict(2) == 0
    table.release()
    assert index.evict(2) == 2


def test_unpublish_takes_everything_built_on_a_bad_page() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    table = filled(pool, 16)
    index.publish(table, list(range(16)), "")
    index.unpublish([table.pages[1]])
    assert index.match(list(range(17)), "")[1] == table.pages[:1]
    table.release()
    pool.check()
    index.check()


def test_hits_without_eviction_do_not_grow_the_books() -> None:
    pool = PagePool(4, 4)
    index = PrefixIndex(pool)
    table = filled(pool, 4)
    index.publish(table, list(range(4)), "")
    keys, _ = index.match(list(range(5)), "")
    for _ in range(10_000):
        index.touch(keys)
    assert len(index._oldest) < 100
