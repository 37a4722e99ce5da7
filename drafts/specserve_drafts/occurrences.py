"""Where what was just said occurred before: in a sequence itself, or in texts that are indexed.

A sequence's own tokens are searched as they are (`OwnText`). What is kept for long is indexed at O(1) a token (`Text`):
for grams of 4, 2 and 1 tokens it remembers where each ended last, and of every such end the one before it: the hash
chains of LZ77 compressors. The chain of the longest gram that is known is followed first, so a few steps find the
latest and longest occurrences; how long a match really is, is then counted backwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 20
"""Longer matches tell no more (measured), and counting them costs."""

SEPARATOR = -1
"""Between texts of different origin: no token, so nothing matches across it and nothing follows into it."""


def _gram(tokens: Sequence[int], end: int, size: int) -> int:
    """One number for the `size` tokens before `end`; a third of the memory of a tuple, and nothing to collect."""
    key = 0
    for token_id in tokens[end - size : end]:
        key = key << 32 | token_id
    return key


class _Chain:
    """Ends of grams of one size, counted from the first token that ever was in the text."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.latest: dict[int, int] = {}
        self.earlier = array("q")  # [end - 1 - dropped] → the end before it of the same gram, 0 = none

    def extend(self, tokens: Sequence[int], dropped: int) -> None:
        """Take in all grams that are followed by a token."""
        size, latest, earlier = self.size, self.latest, self.earlier
        for end in range(len(earlier) + 1, len(tokens)):
            key = _gram(tokens, end, size) if end >= size else SEPARATOR
            earlier.append(latest.get(key, 0))
            latest[key] = end + dropped

    def drop(self, tokens: Sequence[int], count: int, dropped: int) -> None:
        """Forget the first `count` tokens, and what ends after them but reaches into them."""
        for end in range(1, min(count + self.size, len(tokens))):
            key = _gram(tokens, end, self.size) if end >= self.size else SEPARATOR
            if self.latest.get(key) == end + dropped:
                del self.latest[key]
        del self.earlier[:count]


class OwnText:
    """The tokens of one running sequence, which are read only for their own end.

    Comparing 4,000 tokens with the last one takes a microsecond, less than indexing one; so a prompt costs nothing
    until it is searched, and a step of a context of 32,000 tokens some 20 of them.
    """

    _SIZES = (4, 2, 1)

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int32)
        self._len = 0

    def occurrences(self, tokens: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """As `Text.occurrences` of `tokens` in themselves; they begin with those of the call before."""
        ids = self._extended(tokens)
        found: dict[int, int] = {}
        for size, ends in self._ends(ids):
            for end in ends[::-1].tolist():
                if len(found) == limit:
                    return list(found.items())
                if end not in found:
                    found[end] = _match_len(tokens, end, tokens, size)
        return list(found.items())

    def _extended(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        if len(tokens) > len(self._ids):
            grown = np.empty(2 * len(tokens), np.int32)
            grown[: self._len] = self._ids[: self._len]
            self._ids = grown
        self._ids[self._len : len(tokens)] = tokens[self._len :]
        self._len = len(tokens)
        return self._ids[: self._len]

    def _ends(self, ids: NDArray[np.int32]) -> list[tuple[int, NDArray[np.intp]]]:
        """Where the last 4, 2 and 1 tokens ended before, ascending."""
        matched, ends = 1, np.flatnonzero(ids[:-1] == ids[-1]) + 1
        found = []
        for size in reversed(self._SIZES):
            while matched < size:
                matched += 1
                ends = ends[ends >= matched]
                ends = ends[ids[ends - matched] == ids[-matched]] if matched <= len(ids) else ends[:0]
            found.append((size, ends))
        return found[::-1]


def _match_len(tokens: Sequence[int], end: int, tail: Sequence[int], known: int) -> int:
    """How many tokens before `end` are those at the end of `tail`; `known` of them are known to be."""
    length, most = known, min(end, len(tail), LONGEST)
    while length < most and tokens[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length


class Text:
    """Tokens in order, with an index of their grams."""

    def __init__(self, sizes: Sequence[int] = (4, 2, 1)) -> None:
        self.tokens: list[int] = []
        self._dropped = 0
        self._chains = [_Chain(size) for size in sizes]  # longest first

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; O(1) each."""
        self.tokens += tokens
        for chain in self._chains:
            chain.extend(self.tokens, self._dropped)

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens."""
        for chain in self._chains:
            chain.drop(self.tokens, count, self._dropped)
        del self.tokens[:count]
        self._dropped += count

    def occurrences(self, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Where the end of `tail` occurred: (index of the token that followed, tokens that match, at most LONGEST).

        At most `limit`, longer grams first, then the latest first.
        """
        found: dict[int, int] = {}
        tokens, dropped = self.tokens, self._dropped
        for chain in self._chains:
            size, earlier = chain.size, chain.earlier
            if size > len(tail):
                continue
            end = chain.latest.get(_gram(tail, len(tail), size), 0) - dropped
            while end >= size and len(found) < limit:
                if end not in found:
                    found[end] = _match_len(tokens, end, tail, size)
                end = earlier[end - 1] - dropped
        return list(found.items())
