"""The prefix index: full pages by what they hold, so that equal prefixes are computed once.

A page's key is a SHA-256 chain over (parent key, token ids, salt): equal keys mean equal tokens from position 0 on
and the same tenant. Nodes form a forest by parent key; eviction takes leaves first, least recently used. The first
page published under a key stays; a later duplicate belongs to its table alone.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from specserve.pages import PagePool, PageTable


def root_key(salt: str) -> bytes:
    """Parent of a sequence's first page; length-prefixed, so that no salt continues another."""
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(struct.pack("<Q", len(data)) + data).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full page; the salt is in the root of the chain."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}Q", *token_ids)).digest()


@dataclass(slots=True)
class _Node:
    page: int
    parent: bytes
    last_used: int
    num_children: int = 0


class PrefixIndex:
    """Published pages of one pool. Holds one reference on each."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._nodes: dict[bytes, _Node] = {}
        self._tick = 0
        # (last_used, key) of every node that may be a leaf; entries go stale and are checked when popped
        self._oldest: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], salt: str) -> tuple[list[bytes], list[int]]:
        """Keys and pages of the longest published prefix, in whole pages, of at most len(token_ids) - 1 tokens."""
        size = self.pool.page_size
        keys: list[bytes] = []
        pages: list[int] = []
        key = root_key(salt)
        for start in range(0, len(token_ids) - size, size):
            key = page_key(key, token_ids[start : start + size])
            node = self._nodes.get(key)
            if node is None:
                break
            keys.append(key)
            pages.append(node.page)
        return keys, pages

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark as just used; a hit calls it once it is taken."""
        self._tick += 1
        for key in keys:
            node = self._nodes[key]
            node.last_used = self._tick
            if node.num_children == 0:
                heapq.heappush(self._oldest, (node.last_used, key))
        if len(self._oldest) > 2 * len(self._nodes) + 64:
            self._oldest = [(node.last_used, key) for key, node in self._nodes.items() if node.num_children == 0]
            heapq.heapify(self._oldest)

    def publish(self, table: PageTable, token_ids: Sequence[int], salt: str) -> None:
        """Enter the table's full committed pages. Their moves were applied and their rows are finite."""
        size = self.pool.page_size
        keys = table.keys
        first = len(keys)
        if table.cached_len // size == first:
            return
        for i in range(first, table.cached_len // size):
            parent = keys[-1] if keys else root_key(salt)
            keys.append(page_key(parent, token_ids[i * size : (i + 1) * size]))
        # an ancestor that was somebody else's page may be gone by now: enter ours in its place
        while first > 0 and keys[first - 1] not in self._nodes:
            first -= 1
        for i in range(first, len(keys)):
            if keys[i] not in self._nodes:
                self._enter(keys[i], keys[i - 1] if i else root_key(salt), table.pages[i])
        self.touch(keys[first:])

    def _enter(self, key: bytes, parent: bytes, page: int) -> None:
        self._nodes[key] = _Node(page, parent, self._tick)
        if parent in self._nodes:
            self._nodes[parent].num_children += 1
        self.pool.enter_index(page)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that only the index holds, leaves first, oldest first; returns how many."""
        freed = 0
        busy: list[tuple[int, bytes]] = []
        while freed < num_pages and self._oldest and self.pool.num_cached:
            last_used, key = heapq.heappop(self._oldest)
            node = self._nodes.get(key)
            if node is None or node.last_used != last_used or node.num_children:
                continue
            if self.pool.holders[node.page] > 1:
                busy.append((last_used, key))
                continue
            self._remove(key)
            freed += 1
        for entry in busy:
            heapq.heappush(self._oldest, entry)
        return freed

    def unpublish(self, pages: Iterable[int]) -> None:
        """Remove these pages and everything built on them; used when their content proved to be bad."""
        bad = set(pages)
        doomed = {key for key, node in self._nodes.items() if node.page in bad}
        while True:
            more = {key for key, node in self._nodes.items() if node.parent in doomed} - doomed
            if not more:
                break
            doomed |= more
        # leaves first, so that every removal finds its parent's count
        while doomed:
            for key in [key for key in doomed if self._nodes[key].num_children == 0]:
                self._remove(key)
                doomed.remove(key)

    def _remove(self, key: bytes) -> None:
        node = self._nodes.pop(key)
        self.pool.leave_index(node.page)
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.num_children -= 1
            if parent.num_children == 0:
                heapq.heappush(self._oldest, (parent.last_used, node.parent))

    def entries(self) -> Iterator[tuple[bytes, bytes, int]]:
        """(key, parent key, page) of everything published."""
        return ((key, node.parent, node.page) for key, node in self._nodes.items())

    def check(self) -> None:
        """Recount; raises AssertionError when children, parents or pages disagree."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            children[node.parent] = children.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            if node.num_children != children.get(key, 0):
                raise AssertionError(
                    f"page {node.page} has {children.get(key, 0)} children, {node.num_children} counted"
                )
        if {node.page for node in self._nodes.values()} != self.pool.indexed:
            raise AssertionError("the index and the pool disagree about which pages are published")
        if len(self._nodes) != len(self.pool.indexed):
            raise AssertionError("one page is published under two keys")
