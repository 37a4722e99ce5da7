"""Dynamic trees: a drafter's logits become the most promising tree of at most `cap` nodes.

Best first, one draft forward a round for all sequences together: of the nodes known so far the `cap` with the highest
estimated survival are kept, the best of them that were not run yet are run, and their children compete with all others.
A child never survives more surely than its parent, so the kept set is ancestor-closed, and what falls out of it is out
for good, with all that hangs below. Children are the top-k of `log q / T + G`, where G is the noise that the target
itself will draw with, so a good drafter guesses the very draws; at T = 0 they are the top-k of log q. Where a sampled
chain is wanted (specserve/block.py) a node's one child is drawn from q with noise that nobody else looks at, and its
estimate is that of its depth: it tells nothing of the ids, and so the length of a chain does not. Trees are grown on
the host; of a round's logits only the best few ids and their scores come there, in one transfer.
Source: EAGLE-2 (Li et al., 2024), with estimates that are calibrated on line in place of q, and shared noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from specserve_kernels import PURPOSE_TARGET, Ops
from torch import Tensor

from specserve.block import SampledChain, draft_purpose
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import GREEDY_TEMPERATURE
from specserve_drafts.record import committed
from specserve_drafts.transfer import in_one_transfer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# confidence is judged among so many: 24 early-exit answers gave a log loss of 1.366 a step with the softmax of these,
# 1.359 with that of the whole vocabulary, 1.423 with the gap to the best (1.515 with the rank alone)
NUM_RIVALS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """In a round at most `width` nodes of a tree are run, each for `branch` children; no node is deeper than `depth`.

    width = branch = 1 is a chain; branch is at most NUM_RIVALS. `round_cost` is what a draft forward costs, in steps of
    the target: a round is made while it promises more tokens for its time than the step has without it.
    """

    width: int = 8
    branch: int = 8
    depth: int = 8
    round_cost: float = 0.0


class Root(NamedTuple):
    """Where a tree begins: `root_index` is the root's place in its sequence. `max_depth` is how deep nodes may be.

    `samples`: a sampled chain is wanted.
    """

    sequence_id: str
    root_index: int
    cap: int
    temperature: float
    seed: int
    choice: int
    max_depth: int = 1 << 30
    samples: bool = False

    @classmethod
    def of(cls, row: DraftRow, cap: int, max_depth: int = 1 << 30) -> Root:
        return cls(row.sequence_id, row.cached_len, cap, row.temperature, row.seed, row.choice, max_depth, row.samples)


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes to run in one draft forward; those of one tree stand together. All int64.

    Node slots are numbers in [0, cap) of the tree, given anew when a node has fallen out: write a row's K and V at its
    own, the last of its tail, and let it see the root's past and then its tail. `parents` are rows of what was
    run before in this `grow`: first the roots in order, then the rows of each level in turn.
    """

    sequence: Ints  # [rows], which root
    token_ids: Ints  # [rows], target ids
    depths: Ints  # [rows], 1 below the root
    tails: Ints  # [rows, deepest], node slots of the path from below the root, own last; `depths[row]` of them count
    parents: Ints  # [rows]

    @property
    def slots(self) -> Ints:
        """Node slot of each row."""
        return np.asarray(self.tails[np.arange(len(self.depths)), self.depths - 1])


Expand = Callable[[Level], Tensor]
"""Runs the nodes of a level; returns logits, fp32 [rows, draft vocabulary], contiguous. `grow` overwrites them."""


class TreeGrower:
    """Grows the trees of one drafter and learns from their fates how likely its guesses of each kind are.

    `target_ids` int64 [draft vocabulary], where the logits are, are the target's ids of the draft's; None = the same
    ids. Counts are shared by all sequences: they hold nobody's text.
    """

    def __init__(self, name: str, ops: Ops, shape: Shape = Shape(), target_ids: Tensor | None = None) -> None:
        self.name = name
        self.shape = shape
        self.calibration = Calibration(shape.branch)
        self._ops = ops
        self._draft_ids = None if target_ids is None else _DraftIds(target_ids, target_ids.cpu().numpy())
        self._proposed: dict[str, tuple[DraftTree, list[int]]] = {}

    @torch.inference_mode()
    def grow(self, roots: Sequence[Root], logits: Tensor, expand: Expand) -> list[DraftTree]:
        """One tree per root; empty where the best logits of a row were not finite.

        Args:
            roots: all with cap >= 1.
            logits: fp32 [roots, draft vocabulary], of the root rows, contiguous; overwritten.
            expand: called at most `shape.depth - 1` times, with nodes to run.
        """
        if not roots:
            return []
        pool = _Pool(roots, self.shape)
        branch = min(self.shape.branch, max(root.cap for root in roots))
        guesses = _Guesses(self._ops, roots, self._draft_ids, branch, logits.device)
        pool.add(guesses.children(pool.root_level(), logits, self.calibration))
        for _ in range(self.shape.depth - 1):
            level = pool.next_level()
            if level is None:
                break
            pool.add(guesses.children(level, expand(level), self.calibration))
        grown = [(guesses.sampled(i, tree), kinds) for i, (tree, kinds) in enumerate(pool.trees(self.name))]
        self._proposed |= {root.sequence_id: item for root, item in zip(roots, grown, strict=True)}
        return [tree for tree, _ in grown]

    def learn(self, sequence_id: str, result: StepResult) -> None:
        """Count which nodes of the last tree came true, whatever of it was verified."""
        tree, kinds = self._proposed.pop(sequence_id, (DraftTree(), []))
        for node, hit in committed(tree, result.tokens):
            self.calibration.count(kinds[node], hit)

    def forget(self, sequence_id: str) -> None:
        self._proposed.pop(sequence_id, None)


class Calibration:
    """How often guesses of each kind came true, as arrays: `record.Record` for a level's worth of guesses at once.

    A kind is (greedy or sampled, rank among siblings, share, depth). The share of a guess is its part of the softmax
    of the best NUM_RIVALS scores, in buckets of half a unit of log odds: at T = 0 about its q, above it what the gaps
    between the perturbed scores say. A kind's chance is shrunk to that of the kind without depth, and that one to the
    share itself. Old counts fade by halving.
    """

    DEPTHS = 8
    BUCKETS = 32
    LOWEST = -5.0  # log odds
    WEIGHT = 8.0
    MEMORY = 2048.0

    def __init__(self, num_ranks: int) -> None:
        size = 2 * num_ranks * self.BUCKETS
        self._num_ranks = num_ranks
        self._fine = np.zeros((2, size * self.DEPTHS))  # hits, trials
        self._coarse = np.zeros((2, size))

    def kinds(self, sampled: NDArray[np.bool_], shares: Floats, depths: Ints) -> Ints:
        """[rows, ranks], from `sampled` [rows], `shares` [rows, ranks] and the guesses' `depths` [rows]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.log(shares / (1 - shares))
        buckets = np.fmin(np.fmax(2 * (odds - self.LOWEST), 0), self.BUCKETS - 1).astype(np.int64)
        coarse = (sampled[:, None] * self._num_ranks + np.arange(shares.shape[1])) * self.BUCKETS + buckets
        return np.asarray(coarse * self.DEPTHS + np.minimum(depths, self.DEPTHS)[:, None] - 1)

    def estimate(self, kinds: Ints, prior: Floats) -> Floats:
        """Chance that a guess of each kind comes true, given that its parent did; `prior` counts as WEIGHT trials."""
        weight = self.WEIGHT
        hits, trials = self._coarse[:, kinds // self.DEPTHS]
        coarse = (hits + prior * weight) / (trials + weight)
        hits, trials = self._fine[:, kinds]
        return np.asarray((hits + coarse * weight) / (trials + weight))

    def count(self, kind: int, hit: bool) -> None:
        for counts, index in ((self._fine, kind), (self._coarse, kind // self.DEPTHS)):
            if counts[1, index] >= self.MEMORY:
                counts[:, index] /= 2
            counts[:, index] += (hit, 1)


class _DraftIds(NamedTuple):
    """The target's ids of the draft's: where the logits are, and in main memory."""

    there: Tensor
    here: Ints


class _Children(NamedTuple):
    """Best first, [rows, branch]; `chance`: that a child is drawn given its parent, 0 = no child, NaN = bad logits."""

    token_ids: Ints
    chance: Floats
    kinds: Ints


CHAIN_SHARE = 0.5  # stands for the share of a sampled id, whichever it is


class _Guesses:
    """Top-k of `log q / T + G` of the rows of one `grow`, each noise vector made once; and what chains sampled from."""

    def __init__(
        self, ops: Ops, roots: Sequence[Root], draft_ids: _DraftIds | None, branch: int, device: torch.device
    ) -> None:
        self._ops = ops
        self._roots = roots
        self._draft_ids = draft_ids
        self._branch = branch
        self._device = device
        heats = torch.tensor([root.temperature for root in roots], dtype=torch.float32)
        [self._heats] = in_one_transfer([heats], device)
        self._noise: dict[tuple[int, int], Tensor] = {}
        self._sampled = np.array([root.temperature >= GREEDY_TEMPERATURE for root in roots])
        self._chains = np.array([root.samples for root in roots])
        self._probs: list[list[Tensor]] = [[] for _ in roots]  # of each chain's nodes

    def children(self, level: Level, logits: Tensor, calibration: Calibration) -> _Children:
        """`level` are the parents, `logits` [rows, draft vocabulary] theirs."""
        sampled, chains = self._sampled[level.sequence], self._chains[level.sequence]
        if chains.any():
            self._sample(level, logits, np.flatnonzero(chains))
        if (sampled & ~chains).any():
            self._perturb(level, logits, np.flatnonzero(sampled & ~chains))
        ids, scores = self._best(logits)
        finite = np.isfinite(scores[:, 0])  # a lone NaN may be passed over by the backend, a row of them cannot
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores[:, :1])
        shares = weights / weights.sum(axis=1, keepdims=True)
        shares, ids = shares[:, : self._branch], ids[:, : self._branch]
        shares[chains] = CHAIN_SHARE * (np.arange(shares.shape[1]) == 0)
        kinds = calibration.kinds(sampled, shares, level.depths + 1)
        chance = np.where(shares > 0, calibration.estimate(kinds, shares), 0.0)
        chance[~finite] = np.nan
        return _Children(ids if self._draft_ids is None else self._draft_ids.here[ids], chance, kinds)

    def _best(self, logits: Tensor) -> tuple[Ints, Floats]:
        """Draft ids and scores of the best rivals of each row, which come as one: fp64 holds either without loss."""
        columns = self._ops.top_ids(logits, min(NUM_RIVALS, logits.shape[1]))
        found = torch.stack((columns.double(), logits.gather(1, columns).double())).cpu().numpy()
        return found[0].astype(np.int64), found[1]

    def _perturb(self, level: Level, logits: Tensor, rows: Ints) -> None:
        """logits / T + G in place, as the target draws (specserve/sample.py)."""
        keys = [(int(level.sequence[row]), int(level.depths[row])) for row in rows]
        missing = [key for key in dict.fromkeys(keys) if key not in self._noise]
        if missing:
            self._noise |= zip(missing, self._draw_noise(missing, logits.shape[1]), strict=True)
        for row, key in zip(rows.tolist(), keys, strict=True):
            self._heated(logits[row], key[0]).add_(self._noise[key])

    def _heated(self, scores: Tensor, sequence: int) -> Tensor:
        """In place. A GPU would multiply by the inverse of a number; by a tensor it divides, as all others do."""
        return scores.div_(self._heats[sequence])

    def _sample(self, level: Level, logits: Tensor, rows: Ints) -> None:
        """logits / T + G in place, with noise of each chain's own: the largest is a sample of what is kept of the row.

        A row that is not finite is replaced: where a chain ends must not tell what it sampled before.
        """
        for row in rows.tolist():
            sequence, depth = int(level.sequence[row]), int(level.depths[row])
            scores = self._heated(logits[row], sequence)
            scores.masked_fill_(~torch.isfinite(scores.max()), 0.0)
            self._probs[sequence].append(torch.softmax(scores.double(), 0))
            scores.add_(self._draw_noise([(sequence, depth)], len(scores), draft_purpose(depth + 1))[0])

    def sampled(self, index: int, tree: DraftTree) -> DraftTree:
        """The tree of a root, with what it was sampled from if a chain was wanted."""
        if not self._chains[index]:
            return tree
        probs = tuple(row.cpu().numpy() for row in self._probs[index][: len(tree)])
        ids = None if self._draft_ids is None else self._draft_ids.here
        return SampledChain(tree.token_ids, tree.parents, tree.drafters, tree.survival, probs, ids)

    def _draw_noise(self, keys: Sequence[tuple[int, int]], num_columns: int, purpose: int = PURPOSE_TARGET) -> Tensor:
        """[keys, draft vocabulary] for keys (root, depth of the parents)."""
        roots = [self._roots[sequence] for sequence, _ in keys]
        seeds = torch.tensor([root.seed - (1 << 64) if root.seed >= 1 << 63 else root.seed for root in roots])
        indices = torch.tensor([root.root_index + depth + 1 for root, (_, depth) in zip(roots, keys, strict=True)])
        choices = torch.tensor([root.choice for root in roots])
        vocab_size = num_columns if self._draft_ids is None else int(self._draft_ids.here.max()) + 1
        seeds, indices, choices = in_one_transfer((seeds, indices, choices), self._device)
        noise = self._ops.noise(seeds, indices, choices, purpose, vocab_size)
        return noise if self._draft_ids is None else noise[:, self._draft_ids.there]


# fields of a node; its tail, the node slots of its path, comes after them
TOKEN, KIND, DEPTH, NUMBER, PARENT, PARENT_ROW, ROW, SLOT, TAIL = range(9)


class _Pool:
    """The best nodes so far of several trees, best first: arrays [trees, nodes]; column 0 is the root.

    A node whose survival is 0 is none. NUMBER and PARENT tell the nodes of a tree apart, ROW says where a node was run
    (-1: not yet), PARENT_ROW where its parent was, SLOT is its node slot.
    """

    def __init__(self, roots: Sequence[Root], shape: Shape) -> None:
        self._caps = np.array([root.cap for root in roots])
        self._deepest = np.array([min(shape.depth, root.cap, root.max_depth) for root in roots])
        self._shape = shape
        self._num_rounds = 1
        self._trees = np.arange(len(roots))
        self._survival = np.ones((len(roots), 1))
        self._fields = np.zeros((len(roots), 1, TAIL + max(int(self._deepest.max()), 1)), np.int64)
        self._fields[:, 0, ROW] = self._trees
        self._num_rows, self._num_numbers = len(roots), 1
        # tree, column and place among the level's rows of its tree, of the nodes that are being run
        self._running = (self._trees, np.zeros_like(self._trees), np.zeros_like(self._trees))

    def root_level(self) -> Level:
        nothing = np.zeros_like(self._trees)
        return Level(self._trees, nothing - 1, nothing, np.zeros((len(nothing), 0), np.int64), nothing - 1)

    def add(self, children: _Children) -> None:
        """Let the children of the nodes that were just run compete with all nodes known so far."""
        trees, columns, places = self._running
        branch = children.token_ids.shape[1]
        parents = self._fields[trees, columns]
        depths = parents[:, DEPTH] + 1
        chance = np.where((depths <= self._deepest[trees])[:, None], children.chance, 0.0)
        width = int(places.max()) + 1
        survival = np.zeros((len(self._trees), width, branch))
        survival[trees, places] = np.nan_to_num(self._survival[trees, columns, None] * chance)
        fields = np.zeros((len(self._trees), width, branch, self._fields.shape[2]), np.int64)
        new = np.repeat(parents[:, None], branch, axis=1)
        new[:, :, TOKEN], new[:, :, KIND], new[:, :, DEPTH] = children.token_ids, children.kinds, depths[:, None]
        new[:, :, PARENT], new[:, :, PARENT_ROW] = parents[:, NUMBER, None], parents[:, ROW, None]
        new[:, :, NUMBER] = self._num_numbers + places[:, None] * branch + np.arange(branch)
        new[:, :, ROW] = -1
        fields[trees, places] = new
        self._num_numbers += width * branch
        self._keep_best(survival.reshape(len(self._trees), -1), fields.reshape(len(self._trees), width * branch, -1))
        self._survival[trees[np.isnan(children.chance).any(axis=1)]] = 0.0

    def _keep_best(self, survival: Floats, fields: Ints) -> None:
        """Older nodes win ties, so an ancestor is never behind its descendants, and the root is in front."""
        survival = np.concatenate([self._survival, survival], axis=1)
        order = np.argsort(-survival, axis=1, kind="stable")[:, : int(self._caps.max()) + 1]
        every = self._trees[:, None]
        self._survival = survival[every, order]
        self._survival[np.arange(order.shape[1]) > self._caps[:, None]] = 0.0
        self._fields = np.concatenate([self._fields, fields], axis=1)[every, order]

    def next_level(self) -> Level | None:
        """The best nodes that were not run yet and whose children may still get in; None: the trees are done."""
        survival, fields = self._survival, self._fields
        num_nodes = survival.shape[1]
        full = self._caps < num_nodes
        last = np.where(full, survival[self._trees, np.minimum(self._caps, num_nodes - 1)], 0.0)
        ready = (fields[:, :, ROW] < 0) & (fields[:, :, DEPTH] < self._deepest[:, None])
        ready &= survival > last[:, None]
        rank = np.cumsum(ready, axis=1)
        trees, columns = np.nonzero(ready & (rank <= self._shape.width))
        if not len(trees) or not self._pays(float(survival[trees, columns].sum())):
            return None
        places = rank[trees, columns] - 1
        self._running = (trees, columns, places)
        self._num_rounds += 1
        slots = self._free_slots()[trees, places]
        depths = fields[trees, columns, DEPTH]
        fields[trees, columns, SLOT] = slots
        fields[trees, columns, TAIL + depths - 1] = slots
        fields[trees, columns, ROW] = self._num_rows + np.arange(len(trees))
        self._num_rows += len(trees)
        chosen = fields[trees, columns]
        tails = chosen[:, TAIL : TAIL + int(depths.max())]
        return Level(trees, chosen[:, TOKEN].copy(), depths, tails, chosen[:, PARENT_ROW].copy())

    def _pays(self, gain: float) -> bool:
        """Whether a round that may bring `gain` more tokens raises tokens per time; roots count as a token each."""
        cost = self._shape.round_cost
        return gain * (1 + self._num_rounds * cost) >= cost * float(self._survival.sum())

    def _free_slots(self) -> Ints:
        """[trees, most nodes]: the slots that no living node holds, then the others.

        Nodes that were run and live, and those about to be run, are all among the best `cap`: there are enough.
        """
        used = np.zeros((len(self._trees), int(self._caps.max())), bool)
        holds = (self._survival > 0) & (self._fields[:, :, ROW] >= 0) & (self._fields[:, :, DEPTH] > 0)
        used[np.nonzero(holds)[0], self._fields[:, :, SLOT][holds]] = True
        return np.argsort(used, axis=1, kind="stable")

    def trees(self, name: str) -> list[tuple[DraftTree, list[int]]]:
        """Each tree with the kinds of its nodes, best first."""
        return [self._tree(i, name) for i in range(len(self._trees))]

    def _tree(self, index: int, name: str) -> tuple[DraftTree, list[int]]:
        alive = (self._survival[index] > 0) & (self._fields[index, :, DEPTH] > 0)
        nodes = self._fields[index][alive]
        places = {0: -1} | {number: place for place, number in enumerate(nodes[:, NUMBER].tolist())}
        tree = DraftTree(
            tuple(nodes[:, TOKEN].tolist()),
            tuple(places[parent] for parent in nodes[:, PARENT].tolist()),
            (name,) * len(nodes),
            tuple(self._survival[index][alive].tolist()),
        )
        return tree, nodes[:, KIND].tolist()
