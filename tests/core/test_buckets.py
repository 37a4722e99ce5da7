"""Buckets hold the steps that they are picked for, are the smallest that do, and exist only where a step could be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.buckets import ALONE, Bucket, Buckets, make_buckets

sizes = st.integers(1, 300)


def whole(max_rows: int = 128, max_pages: int = 512, page_size: int = 16) -> Buckets:
    return make_buckets(max_rows, max_pages, page_size, lambda pages: 1 << 30)


@given(rows=sizes, depth=st.integers(ALONE, 70), pages=st.integers(1, 700))
def test_a_bucket_is_the_smallest_that_holds_the_step(rows: int, depth: int, pages: int) -> None:
    buckets = whole()
    found = buckets.try_bucket(rows, depth, pages)
    holding = [b for b in buckets.known if b.rows >= rows and b.depth >= depth and b.pages >= pages]
    if rows < (1, 2, 3)[min(depth, 1) + 1] or depth >= rows:  # there is no such step
        return
    assert (found is None) == (not holding)
    if found is not None:
        assert found == min(holding) and found in holding
        assert (found.depth, found.pages) == (min(b.depth for b in holding), min(b.pages for b in holding))


@given(max_rows=sizes, max_pages=sizes, page_size=st.sampled_from([1, 16, 64]), most=st.integers(0, 200))
def test_what_does_not_fit_one_launch_has_no_bucket(max_rows: int, max_pages: int, page_size: int, most: int) -> None:
    buckets = make_buckets(max_rows, max_pages, page_size, lambda pages: most // pages)
    assert all(b.rows <= max_rows and b.pages <= max_pages and b.rows <= most // b.pages for b in buckets.known)
    assert buckets.pages[-1] == max_pages and list(buckets.pages) == sorted(set(buckets.pages))
    listed = buckets.largest_first()
    assert listed == sorted(listed, reverse=True) and set(listed) == buckets.known
    for bucket in listed:
        assert buckets.try_bucket(bucket.rows, bucket.depth, bucket.pages) == bucket


@pytest.mark.parametrize(
    ("rows", "depth", "exists"),
    [
        (1, ALONE, True),
        (1, 0, False),
        (2, 0, True),
        (2, 8, False),
        (4, 8, True),
        (8, 64, False),
        (16, 64, True),
    ],
)
def test_depths_need_rows(rows: int, depth: int, exists: bool) -> None:
    assert (Bucket(rows, depth, 64) in whole().known) == exists


def test_contexts_grow_by_a_factor_up_to_the_longest() -> None:
    assert whole(max_pages=8192).pages == (64, 256, 1024, 4096, 8192)
    assert whole(max_pages=10).pages == (10,)
    assert len(whole(max_pages=8192).known) < 130  # each is a graph to capture
