"""Where one answer is in its grammar, and what each row of a draft tree may draw.

llguidance can take tokens back, which makes a walk over a tree cheap; where it cannot, or fails in a draft, the
matcher that walked is replaced by a copy of the one that only ever saw committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specserve.errors import GrammarStuck
from specserve.grammar.source import why
from specserve.proposal import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher

Packed = NDArray[np.uint32]
"""Allowed ids as bits, lowest first: id i is bit i % 32 of word i // 32; [rows, ceil(vocab / 32)]."""


def allowed_ids(masks: Packed, vocab_size: int) -> NDArray[np.bool_]:
    """Packed masks [..., words] as booleans [..., vocab]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


class GrammarState:
    """Where one answer is in its grammar. Not thread-safe; forks are independent."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._committed = matcher
        self._scout = matcher.deep_copy()
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._ended = False

    @property
    def num_words(self) -> int:
        return -(-self._vocab_size // 32)

    @property
    def finished(self) -> bool:
        """Whether nothing but the end of the answer may follow."""
        return self._ended or (self._committed.is_stopped() and self._committed.is_accepting())

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        twin = GrammarState(self._committed.deep_copy(), self._vocab_size, self._eos)
        twin._ended = self._ended
        return twin

    def accept(self, token_ids: Sequence[int]) -> None:
        """Commit tokens.

        Raises:
            GrammarStuck: one of them is not allowed; those before it are committed.
        """
        for token_id in token_ids:
            if token_id in self._eos:
                if not (self._ended or self._committed.is_accepting()):
                    raise GrammarStuck("the answer ended before its grammar did")
                self._ended = True
            elif self._ended or not self._consumed(self._committed, token_id):
                raise GrammarStuck(f"the answer's grammar does not allow token {token_id} here")
            elif not self._consumed(self._scout, token_id):
                self._scout = self._committed.deep_copy()

    def masks(self, tree: DraftTree) -> Packed:
        """Allowed ids at the root's row and at each node's row, [1 + nodes, words].

        A row of zeros: the node is not allowed where it stands, or nothing may follow it. All EOS ids are allowed
        wherever the grammar is complete, and nowhere else.

        Raises:
            GrammarStuck: nothing may follow what is committed.
        """
        masks = np.zeros((1 + len(tree), self.num_words), np.uint32)
        self._fill(masks[0])
        if not masks[0].any():  # perhaps only the scout's trouble: states that earlier drafts left in its lexer
            self._scout = self._committed.deep_copy()
            self._fill(masks[0])
        if not masks[0].any():
            raise GrammarStuck(f"the answer's grammar allows no token here: {why(self._scout) or 'a dead end'}")
        self._walk(tree, masks)
        return masks

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree without nodes that the grammar does not allow, and without what stands below them."""
        valid = self._walk(tree, None)
        if all(valid):
            return tree
        kept: dict[int, int] = {-1: -1}
        for node in (node for node, good in enumerate(valid) if good):
            kept[node] = len(kept) - 1
        nodes = [node for node in kept if node >= 0]
        return DraftTree(
            tuple(tree.token_ids[node] for node in nodes),
            tuple(kept[tree.parents[node]] for node in nodes),
            tuple(tree.drafters[node] for node in nodes),
        )

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that the grammar all but forces next: the usual spelling of the only text possible.

        Guesses, for verification to judge: the target may split the same text into other tokens.
        """
        if self._ended or limit < 1:
            return []
        scout = self._scout
        tokens = scout.compute_ff_tokens()[:limit]
        steps = scout.try_consume_tokens(tokens) if tokens else 0
        complete = scout.is_stopped() and scout.is_accepting() and bool(self._eos)
        tokens = tokens[:steps]
        self._rewind([], steps)
        return [*tokens, self._eos[0]] if complete and len(tokens) < limit else tokens

    def _consumed(self, matcher: LLMatcher, token_id: int) -> bool:
        """Consume a token if it is allowed; an id that is none, -1 of a padded row say, never reaches llguidance."""
        return 0 <= token_id < self._vocab_size and matcher.try_consume_tokens([token_id]) == 1

    def _fill(self, row: Packed) -> None:
        """The scout's mask; zeros if it has none. llguidance does not undo an EOS, so it is never given one."""
        if self._ended:
            self._set_eos(row, True)
            return
        accepting = self._scout.is_accepting()
        if not (accepting and self._scout.is_stopped()):
            try:
                self._scout.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            except ValueError:
                row[:] = 0
            if self._scout.is_error():
                row[:] = 0
                return
        self._set_eos(row, accepting)

    def _set_eos(self, row: Packed, allowed: bool) -> None:
        for token_id in self._eos:
            word, bit = token_id // 32, np.uint32(1 << token_id % 32)
            row[word] = row[word] | bit if allowed else row[word] & ~bit

    def _walk(self, tree: DraftTree, masks: Packed | None) -> list[bool]:
        """Visit the tree depth first with the scout and bring it back; which nodes are allowed where they stand."""
        valid = [False] * len(tree)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []  # nodes consumed, from the root down
        todo = children.get(-1, [])[::-1]
        while todo:
            node = todo.pop()
            above = path.index(tree.parents[node]) + 1 if tree.parents[node] >= 0 else 0
            if above < len(path):
                self._rewind([tree.token_ids[i] for i in path[:above]], len(path) - above)
                del path[above:]
            if tree.token_ids[node] in self._eos or self._ended:
                valid[node] = tree.token_ids[node] in self._eos and (self._ended or self._scout.is_accepting())
                if valid[node] and masks is not None:
                    self._set_eos(masks[1 + node], True)
                continue
            if not self._consumed(self._scout, tree.token_ids[node]):
                continue
            path.append(node)
            valid[node] = True
            if masks is not None:
                self._fill(masks[1 + node])
            todo += children.get(node, [])[::-1]
        self._rewind([], len(path))
        return valid

    def _rewind(self, kept: Sequence[int], steps: int) -> None:
        """Take the scout back `steps` tokens; if it cannot, a new one goes `kept` tokens down from the root."""
        if self._scout.is_error() or (steps and not self._scout.rollback(steps)):
            self._scout = self._committed.deep_copy()
            self._scout.try_consume_tokens(list(kept))
