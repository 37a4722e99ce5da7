"""Where one answer is in its grammar, and what each row of a draft tree may draw.

llguidance can take tokens back, which makes a walk over a tree cheap; where it cannot, or fails in a draft, the
matcher that walked is replaced by a copy of the one that only ever saw committed tokens. Where a lexer that all
answers share is full, they go on with a new one: what one answer explored must not end another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specserve.errors import GrammarStuck
from specserve.grammar.source import invalid, new_matcher, why
from specserve.proposal import DraftTree

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Packed = NDArray[np.uint32]
"""Allowed ids as bits, lowest first: id i is bit i % 32 of word i // 32; [rows, ceil(vocab / 32)]."""


def allowed_ids(masks: Packed, vocab_size: int) -> NDArray[np.bool_]:
    """Packed masks [..., words] as booleans [..., vocab]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


class Grammar:
    """A compiled grammar, shared by all answers that follow it.

    Raises:
        GrammarInvalid: llguidance refuses it.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._source = source
        self._matcher = new_matcher(tokenizer, source)
        self._matcher.compute_bitmask()  # builds most of the lexer, here and not in somebody's first step
        if self._matcher.is_error():
            raise invalid(f"cannot be used: {why(self._matcher)}")

    def start(self) -> GrammarState:
        """The state of an answer without a token."""
        return GrammarState(self, self._matcher, [])

    def renew(self, worn: LLMatcher) -> LLMatcher:
        """A matcher at the start with another lexer than `worn` has.

        All copies of a matcher share one lexer, which only grows; when its limit of states is reached, it is over
        for all of them. Compiling again costs what it did the first time: about 1 ms, bounded by the trial.
        """
        if self._matcher is worn:
            self._matcher = new_matcher(self._tokenizer, self._source)
        return self._matcher


class GrammarState:
    """Where one answer is in its grammar. Not thread-safe; forks are independent."""

    def __init__(self, grammar: Grammar, origin: LLMatcher, history: list[int], committed: LLMatcher | None = None):
        """`origin` is the fresh matcher that `committed`, which consumed `history`, was copied from."""
        self._grammar = grammar
        self._origin = origin
        self._history = history
        self._committed = committed or origin.deep_copy()
        self._scout = self._committed.deep_copy()
        self._vocab_size = grammar.vocab_size
        self._eos = grammar.eos_token_ids
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
        twin = GrammarState(self._grammar, self._origin, list(self._history), self._committed.deep_copy())
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
            elif self._ended or not self._commit(token_id):
                raise GrammarStuck(f"the answer's grammar does not allow token {token_id} here")

    def masks(self, tree: DraftTree) -> Packed:
        """Allowed ids at the root's row and at each node's row, [1 + nodes, words].

        A row of zeros: the node is not allowed where it stands, or nothing may follow it. All EOS ids are allowed
        wherever the grammar is complete, and nowhere else.

        Raises:
            GrammarStuck: nothing may follow what is committed.
        """
        masks = np.zeros((1 + len(tree), self.num_words), np.uint32)
        self._fill(masks[0])
        if not masks[0].any():  # perhaps only the scout's trouble
            self._scout = self._committed.deep_copy()
            self._fill(masks[0])
        for _ in range(2):  # another state may have renewed the lexer, and worn that one too
            if not masks[0].any() and _is_worn(self._scout):
                self._renew()
                self._fill(masks[0])
        if not masks[0].any():
            raise GrammarStuck(f"the answer's grammar allows no token here: {why(self._scout) or 'a dead end'}")
        self._walk(tree, masks)
        return masks

    def fit(self, tree: DraftTree) -> tuple[DraftTree, Packed]:
        """The tree without nodes that cannot be drawn where they stand and what is below them, and its masks.

        A row of zeros remains where a node may be drawn and nothing may follow it. Raises as `masks`.
        """
        masks = self.masks(tree)
        kept: dict[int, int] = {-1: -1}
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if parent in kept and self._allows(masks[1 + parent], token_id):
                kept[node] = len(kept) - 1
        if len(kept) == 1 + len(tree):
            return tree, masks
        nodes = [node for node in kept if node >= 0]
        pruned = DraftTree(
            tuple(tree.token_ids[node] for node in nodes),
            tuple(kept[tree.parents[node]] for node in nodes),
            tuple(tree.drafters[node] for node in nodes),
        )
        return pruned, masks[[0, *(1 + node for node in nodes)]]

    def prune(self, tree: DraftTree) -> DraftTree:
        """The tree of `fit` alone."""
        return self.fit(tree)[0]

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` tokens that must follow: where one text is possible, masks allow its usual spelling only.

        At the end of the grammar an EOS id follows, the first of several: that one is a guess.
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

    def _commit(self, token_id: int) -> bool:
        """Consume a committed token; False if it is not allowed."""
        good = self._consumed(self._committed, token_id)
        for _ in range(2):
            if not good and self._is_worn_at(token_id):
                self._renew()
                good = self._consumed(self._committed, token_id)
        if good:
            self._history.append(token_id)
            if not self._consumed(self._scout, token_id):
                self._scout = self._committed.deep_copy()
        return good

    def _renew(self) -> None:
        """The same place, with another lexer."""
        self._origin = self._grammar.renew(self._origin)
        self._committed = self._origin.deep_copy()
        if self._committed.try_consume_tokens(self._history) < len(self._history):
            raise GrammarStuck(f"{len(self._history)} tokens are more than this grammar can be followed")
        self._scout = self._committed.deep_copy()

    def _is_worn_at(self, token_id: int) -> bool:
        """Whether a full lexer, not the grammar, refused a token. Asked of a copy, which the question ends."""
        if not 0 <= token_id < self._vocab_size:
            return False
        probe = self._committed.deep_copy()
        probe.consume_token(token_id)
        return _is_worn(probe)

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

    def _allows(self, row: Packed, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size and bool(row[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    def _walk(self, tree: DraftTree, masks: Packed) -> None:
        """Fill the nodes' rows: the scout visits the tree depth first, and is brought back to the root."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []  # nodes consumed, from the root down
        todo = children.get(-1, [])[::-1]
        while todo:
            node = todo.pop()
            token_id, parent = tree.token_ids[node], tree.parents[node]
            if not self._allows(masks[1 + parent], token_id):
                continue
            if token_id in self._eos:
                self._set_eos(masks[1 + node], True)
                continue
            depth = 0 if parent < 0 else path.index(parent) + 1
            if not self._rewind([tree.token_ids[i] for i in path[:depth]], len(path) - depth):
                return  # rows not visited stay zero: the draft ends there
            del path[depth:]
            if self._consumed(self._scout, token_id):
                path.append(node)
                self._fill(masks[1 + node])
                todo += children.get(node, [])[::-1]
        self._rewind([], len(path))

    def _rewind(self, kept: Sequence[int], steps: int) -> bool:
        """Take the scout back `steps` tokens; if it cannot, a new one goes `kept` tokens down from the root.

        False: that one cannot either, and is at the root.
        """
        if not self._scout.is_error() and (not steps or self._scout.rollback(steps)):
            return True
        self._scout = self._committed.deep_copy()
        if not kept or self._scout.try_consume_tokens(list(kept)) == len(kept):
            return True
        self._scout = self._committed.deep_copy()
        return False


def _is_worn(matcher: LLMatcher) -> bool:
    """Whether its lexer ran out of states or fuel; llguidance tells only in words."""
    text = matcher.get_error().lower()
    return "lexer error" in text or "fuel" in text
