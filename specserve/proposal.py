"""What passes between the engine and a drafter: trees in, verdicts out.

A draft is a tree under the root row; a chain is a tree, and no draft is the empty tree. Parents point at
earlier nodes, -1 is the root. Nothing here influences which tokens are drawn, only how many are drawn a step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in creation order: `token_ids[i]` under `parents[i]` (a node before it, or -1 = the root).

    `drafters[i]` names who guessed node i. Siblings carry distinct ids. `survival[i]` is the drafter's estimate of the
    chance that node i is accepted, ancestors included, so never above its parent's; () = it has none.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    survival: tuple[float, ...] = ()

    @classmethod
    def chain(cls, token_ids: SequenceOf[int], drafter: str, survival: SequenceOf[float] = ()) -> DraftTree:
        n = len(token_ids)
        return cls(tuple(token_ids), tuple(range(-1, n - 1)), (drafter,) * n, tuple(survival))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def depths(self) -> SequenceOf[int]:
        """Depth of each node, 1 below the root."""
        if self.is_chain:
            return range(1, len(self) + 1)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[tuple[int, ...]]:
        """Token ids from below the root to each node, itself last."""
        paths: list[tuple[int, ...]] = []
        for token_id, parent in zip(self.token_ids, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
        return paths

    def fault(self, vocab_size: int) -> str | None:
        """Why this tree cannot be verified, or None if it can."""
        n = len(self.token_ids)
        if not {*map(type, self.token_ids), *map(type, self.parents)} <= {int}:
            return "has ids or parents that are not integers"
        if len(self.parents) != n or len(self.drafters) != n:
            return f"has {n} ids, {len(self.parents)} parents and {len(self.drafters)} drafters"
        if n and not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            at, outside = next((at, i) for at, i in enumerate(self.token_ids) if not 0 <= i < vocab_size)
            return f"node {at} has id {outside}, outside the vocabulary of {vocab_size}"
        fault = None if self.is_chain else self._parents_fault()
        return fault or (self._survival_fault() if self.survival else None)

    def _parents_fault(self) -> str | None:
        wrong = [(i, parent) for i, parent in enumerate(self.parents) if not -1 <= parent < i]
        if wrong:
            return f"node {wrong[0][0]} has parent {wrong[0][1]}; allowed: -1 to {wrong[0][0] - 1}"
        siblings_differ = len(set(zip(self.parents, self.token_ids, strict=True))) == len(self)
        return None if siblings_differ else "has two siblings with the same id"

    def _survival_fault(self) -> str | None:
        if len(self.survival) != len(self):
            return f"has {len(self)} nodes and {len(self.survival)} estimates of survival"
        for i, (parent, value) in enumerate(zip(self.parents, self.survival, strict=True)):
            most = self.survival[parent] if parent >= 0 else 1.0
            if not 0.0 <= value <= most:  # NaN is neither
                return f"node {i} has survival {value}; allowed: 0 to {most}, its parent's"
        return None

    def prune(self, max_nodes: int, max_depth: int) -> DraftTree:
        """At most `max_nodes` nodes no deeper than `max_depth`: those of highest survival, or else the first.

        Ancestors precede and survive at least as surely, so the set stays closed.
        """
        if len(self) <= min(max_nodes, max_depth):
            return self
        depths = self.depths()
        if len(self) <= max_nodes and max(depths) <= max_depth:
            return self
        order: SequenceOf[int] = range(len(self))
        if self.survival:
            order = sorted(order, key=lambda i: -self.survival[i])
        return self.keep([i for i in order if depths[i] <= max_depth][:max_nodes])

    def keep(self, nodes: SequenceOf[int]) -> DraftTree:
        """Only these nodes, in their own order; the ancestors of each must be among them."""
        nodes = sorted(nodes)
        n = len(nodes)
        if not n or nodes[-1] == n - 1:
            return DraftTree(self.token_ids[:n], self.parents[:n], self.drafters[:n], self.survival[:n])
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.token_ids[i] for i in nodes),
            tuple(place[self.parents[i]] for i in nodes),
            tuple(self.drafters[i] for i in nodes),
            tuple(self.survival[i] for i in nodes) if self.survival else (),
        )


EMPTY_TREE = DraftTree()


class DraftRow(NamedTuple):
    """A sequence as its drafter sees it. `token_ids` ends with the root; neither it nor `pages` may be modified.

    `pages` hold slots [0, cached_len) and, in `propose`, the slots of the root and of as many nodes as its cap allows.
    `salt` "" = it shares nothing with other sequences. `prediction`: tokens that the caller expects in the answer.
    `epoch` changes when the sequence was preempted: its pages are others now, and hold nothing of a drafter's layers.
    `samples`: its draft is to be a chain that was sampled, with what from (specserve/block.py).
    """

    sequence_id: str
    token_ids: SequenceOf[int]
    prompt_len: int
    cached_len: int
    seed: int
    choice: int
    temperature: float
    salt: str
    pages: SequenceOf[int] = ()
    prediction: SequenceOf[int] = ()
    epoch: int = 0
    samples: bool = False


class StepResult(NamedTuple):
    """What the target made of a step of one sequence: the tree, the accepted nodes in order, the bonus token.

    `tokens` is what was committed after the cut: the path's ids and the bonus, or a prefix of them. `drawn` are the
    target's tokens at the root and at each node, -1 or -2 where it drew none. `top_ids[row]` are the ids of its eight
    largest raw logits there, best first, rejected nodes included; () unless the drafter wants them.
    """

    tree: DraftTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    drawn: SequenceOf[int] = ()
    top_ids: SequenceOf[SequenceOf[int]] = ()


class Drafter(Protocol):
    """Guesses the tokens that follow a root. State is per sequence and costs O(new tokens) a step.

    `wants_top_ids`: fill in `StepResult.top_ids`. Model drafters get the target as a `Forward` when they are made
    (specserve/forward.py).
    """

    name: str
    wants_top_ids: bool

    def start(self, view: DraftRow) -> None:
        """Called before the first `propose` of a sequence, in a step after its first token left."""

    def propose(self, rows: SequenceOf[DraftRow], caps: SequenceOf[int]) -> SequenceOf[DraftTree]:
        """One tree per row, of at most its cap of nodes; may be empty. Called only with caps >= 1."""
        ...

    def observe(self, view: DraftRow, result: StepResult) -> None:
        """What a step committed, if the drafter was asked for its tree."""

    def stop(self, view: DraftRow) -> None:
        """The sequence ended; drop its state. Unknown sequences are ignored."""
