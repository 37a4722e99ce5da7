"""The law of drawn tokens under speculation, proven by counting every outcome.

The target is a table of fractions over 3 to 5 ids. One *atom* of noise per (choice, draw index) replaces the
Gumbel vector: `grid` equally likely values, and under each prefix a value names a token by that prefix's own
shuffled inverse CDF, as one noise vector gives a different argmax under different logits. All joint atoms can be
listed, so a law is a count and equality is exact. Drafts may look at every atom. If each atom gives the plain
tokens under *every* tree, then no drafter, whatever it looks at, can change the output; the planted errors at the
end show that the same checks see the mistakes that a real engine makes.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import pytest

from specserve.proposal import DraftTree
from specserve.verify import walk

PROMPT = (0, 1)
LENGTH = 3  # tokens of the answer whose joint law is proven
Prefix = tuple[int, ...]
Atoms = tuple[tuple[int, ...], ...]  # [choice][draw index - len(PROMPT)]


@dataclass(frozen=True)
class Target:
    """p(next | prefix) in units of 1 / grid, with a penalty that depends on the whole prefix of the row."""

    vocab: int
    grid: int = 6

    @cache  # noqa: B019  (a test's few records)
    def _base(self, prefix: Prefix) -> tuple[int, ...]:
        rng = random.Random(f"base {self.vocab} {prefix}")
        cuts = sorted(rng.randint(0, self.grid) for _ in range(self.vocab - 1))
        return tuple(b - a for a, b in itertools.pairwise([0, *cuts, self.grid]))

    def counts(self, prefix: Prefix, penalised: Prefix) -> list[int]:
        """The base law of `prefix`, minus half the weight of each id of `penalised`, which goes to the next id."""
        counts = list(self._base(prefix))
        for token in sorted(set(penalised[len(PROMPT) :])):
            moved = (counts[token] + 1) // 2
            counts[token] -= moved
            counts[(token + 1) % self.vocab] += moved
        return counts

    def prob(self, prefix: Prefix, token: int) -> Fraction:
        return Fraction(self.counts(prefix, prefix)[token], self.grid)

    @cache  # noqa: B019
    def draw(self, prefix: Prefix, penalised: Prefix, atom: int) -> int:
        """The token that `atom` names under this prefix: an inverse CDF shuffled by the prefix."""
        cells = [token for token, count in enumerate(self.counts(prefix, penalised)) for _ in range(count)]
        random.Random(f"cells {self.vocab} {prefix}").shuffle(cells)
        return cells[atom]


@dataclass(frozen=True)
class Step:
    """One speculative step around the real `walk`; a planted error overrides one decision of it."""

    target: Target

    def penalty_prefix(self, root: Prefix, row: Prefix) -> Prefix:
        return row

    def draw_index(self, root: Prefix, row: Prefix) -> int:
        """A row draws the token whose index is the length of the row's prefix."""
        return len(row)

    def choice_key(self, choice: int) -> int:
        return choice

    def walk(self, tree: DraftTree, drawn: list[int]) -> tuple[tuple[int, ...], int]:
        return walk(tree, drawn)

    def run(self, prefix: Prefix, tree: DraftTree, atoms: Atoms, choice: int) -> Prefix:
        """The tokens that the step commits."""
        rows = [prefix]
        for token, parent in zip(tree.token_ids, tree.parents, strict=True):
            rows.append((*rows[1 + parent], token))
        drawn = []
        for row in rows:
            index = self.draw_index(prefix, row) - len(PROMPT)
            stream = atoms[self.choice_key(choice)]
            # Rows deeper than the proven length have no atom; nothing of them is looked at.
            atom = stream[index] if index < len(stream) else 0
            drawn.append(self.target.draw(row, self.penalty_prefix(prefix, row), atom))
        path, bonus = self.walk(tree, drawn)
        return (*(tree.token_ids[node] for node in path), bonus)


Drafts = Callable[[Target, Prefix, tuple[int, ...]], DraftTree]


def plain(target: Target, stream: tuple[int, ...], prefix: Prefix = PROMPT) -> Prefix:
    """The answer without speculation: one row a step."""
    for index in range(len(prefix) - len(PROMPT), len(stream)):
        prefix = (*prefix, target.draw(prefix, prefix, stream[index]))
    return prefix[len(PROMPT) :]


def speculative(step: Step, drafts: Drafts, atoms: Atoms, choice: int, length: int) -> Prefix:
    """The first `length` tokens, by steps."""
    prefix = PROMPT
    while len(prefix) < len(PROMPT) + length:
        tree = drafts(step.target, prefix, atoms[choice])
        prefix += step.run(prefix, tree, atoms, choice)
    return prefix[len(PROMPT) : len(PROMPT) + length]


def no_draft(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    return DraftTree()


def true_chain(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    """All that follows, as the noise will have it: everything is accepted."""
    return DraftTree.chain(plain(target, stream)[len(prefix) - len(PROMPT) :], "true")


def fixed_chain(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    return DraftTree.chain([0, 1, 0], "fixed")


def cherry_picker(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    """Drafts the truth only when it is an even id and the next atom is high; it stops at the first other."""
    chain = []
    for index in range(len(prefix) - len(PROMPT), LENGTH):
        token = plain(target, stream)[index] if index < len(stream) else 0
        if token % 2 or stream[min(index + 1, len(stream) - 1)] < target.grid // 2:
            chain.append((token + 1) % target.vocab)
            break
        chain.append(token)
    return DraftTree.chain(chain, "cherry")


def full_tree(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    """Every id under the root, and every id under each of those: two draws are always accepted."""
    vocab = target.vocab
    ids = tuple(range(vocab)) * (vocab + 1)
    parents = (-1,) * vocab + tuple(node for node in range(vocab) for _ in range(vocab))
    return DraftTree(ids, parents, ("full",) * len(ids))


def noisy_tree(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    """A random tree that depends on all the noise, past and to come."""
    rng = random.Random(f"{prefix} {stream}")
    ids: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(0, 6)):
        node = (rng.randint(-1, len(ids) - 1), rng.randrange(target.vocab))
        if node not in zip(parents, ids, strict=True):
            parents.append(node[0])
            ids.append(node[1])
    return DraftTree(tuple(ids), tuple(parents), ("noisy",) * len(ids))


def late_truth(target: Target, prefix: Prefix, stream: tuple[int, ...]) -> DraftTree:
    """The truth behind wrong siblings at each depth: the accepted path is never a prefix of the nodes."""
    ids: list[int] = []
    parents: list[int] = []
    parent = -1
    for token in plain(target, stream)[len(prefix) - len(PROMPT) :]:
        ids += [(token + 1) % target.vocab, token]
        parents += [parent, parent]
        parent = len(ids) - 1
    return DraftTree(tuple(ids), tuple(parents), ("late",) * len(ids))


DRAFTERS: list[Drafts] = [no_draft, true_chain, fixed_chain, cherry_picker, full_tree, noisy_tree, late_truth]
TARGETS = [Target(3), Target(4), Target(5)]


def streams(target: Target, length: int) -> Iterator[tuple[int, ...]]:
    """All equally likely noise atoms of one choice."""
    return itertools.product(range(target.grid), repeat=length)


def product_law(target: Target, length: int) -> dict[Prefix, Fraction]:
    """p(x1) p(x2 | x1) … of every answer that can occur."""
    law: dict[Prefix, Fraction] = {}
    for answer in itertools.product(range(target.vocab), repeat=length):
        prob = Fraction(1)
        for index, token in enumerate(answer):
            prob *= target.prob(PROMPT + answer[:index], token)
        if prob:
            law[answer] = prob
    return law


def check_law(step: Step, drafts: Drafts) -> None:
    """The joint law of the first tokens is the target's, exactly."""
    counts = Counter(speculative(step, drafts, (stream,), 0, LENGTH) for stream in streams(step.target, LENGTH))
    total = step.target.grid**LENGTH
    law = {answer: Fraction(count, total) for answer, count in counts.items()}
    assert law == product_law(step.target, LENGTH)


def check_atoms(step: Step, drafts: Drafts) -> None:
    """The same noise gives the tokens of plain decoding."""
    for stream in streams(step.target, LENGTH):
        assert speculative(step, drafts, (stream,), 0, LENGTH) == plain(step.target, stream)


def check_choices(step: Step, drafts: Drafts, num_choices: int = 2, length: int = 2) -> None:
    """The joint law of the choices of one request is the product of their laws."""
    counts: Counter[tuple[Prefix, ...]] = Counter()
    for flat in streams(step.target, num_choices * length):
        atoms = tuple(flat[c * length : (c + 1) * length] for c in range(num_choices))
        answers = tuple(speculative(step, drafts, atoms, choice, length) for choice in range(num_choices))
        counts[answers] += 1
    single = product_law(step.target, length)
    expected = {}
    for answers in itertools.product(single, repeat=num_choices):
        prob = Fraction(1)
        for answer in answers:
            prob *= single[answer]
        expected[answers] = prob
    total = step.target.grid ** (num_choices * length)
    assert {answers: Fraction(count, total) for answers, count in counts.items()} == expected


def all_trees(vocab: int, max_nodes: int) -> list[DraftTree]:
    """Every tree of at most `max_nodes` nodes, in every order of its nodes."""
    layers = [[((), ())]]
    for _ in range(max_nodes):
        grown = []
        for ids, parents in layers[-1]:
            taken = set(zip(parents, ids, strict=True))
            for node in itertools.product(range(-1, len(ids)), range(vocab)):
                if node not in taken:
                    grown.append(((*ids, node[1]), (*parents, node[0])))
        layers.append(grown)  # type: ignore[arg-type]
    return [DraftTree(ids, parents, ("all",) * len(ids)) for layer in layers for ids, parents in layer]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"vocab{t.vocab}")
def test_atoms_name_tokens_with_the_target_probabilities(target: Target) -> None:
    for prefix in (PROMPT, (*PROMPT, 1), (*PROMPT, 2, 2)):
        drawn = Counter(target.draw(prefix, prefix, atom) for atom in range(target.grid))
        assert [Fraction(drawn[t], target.grid) for t in range(target.vocab)] == [
            target.prob(prefix, t) for t in range(target.vocab)
        ]


@pytest.mark.parametrize("drafts", DRAFTERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"vocab{t.vocab}")
def test_law_of_three_tokens_is_the_targets(target: Target, drafts: Drafts) -> None:
    check_law(Step(target), drafts)
    check_atoms(Step(target), drafts)


@pytest.mark.parametrize("drafts", DRAFTERS, ids=lambda d: d.__name__)
def test_choices_are_independent(drafts: Drafts) -> None:
    check_choices(Step(Target(3)), drafts)


def test_law_of_three_choices_is_the_product() -> None:
    check_choices(Step(Target(3, grid=4)), late_truth, num_choices=3)


def test_every_tree_of_up_to_four_nodes_commits_plain_tokens_under_every_atom() -> None:
    """A drafter is a function from what it sees to a tree: covering all trees covers all drafters."""
    target = Target(3, grid=4)
    step = Step(target)
    trees = all_trees(target.vocab, max_nodes=4)
    assert len(trees) == 1 + 3 + 3 * 5 + 3 * 5 * 7 + 3 * 5 * 7 * 9
    for stream in streams(target, LENGTH):
        answer = plain(target, stream)
        for tree in trees:
            committed = step.run(PROMPT, tree, (stream,), 0)
            assert committed[:LENGTH] == answer[: len(committed)]


# ---- planted errors ---------------------------------------------------------------------------------------------


class SharedPenaltyRow(Step):
    """One penalty row for the whole tree: the root's."""

    def penalty_prefix(self, root: Prefix, row: Prefix) -> Prefix:
        return root


class BonusFromRootRow(Step):
    """The bonus token is what the root's row drew."""

    def walk(self, tree: DraftTree, drawn: list[int]) -> tuple[tuple[int, ...], int]:
        return walk(tree, drawn)[0], drawn[0]


class BonusFromNextRow(Step):
    """Rows are counted without the root: the bonus comes from the row one too far."""

    def walk(self, tree: DraftTree, drawn: list[int]) -> tuple[tuple[int, ...], int]:
        path, bonus = walk(tree, drawn)
        row = path[-1] + 2 if path else 1
        return path, drawn[row] if row < len(drawn) else bonus


class PositionOffByOne(Step):
    """A node draws with the noise of its own position, so two depths share a vector."""

    def draw_index(self, root: Prefix, row: Prefix) -> int:
        return max(len(root), len(row) - 1)


class SlotInsteadOfPosition(Step):
    """All nodes of a step share the noise of the step's root."""

    def draw_index(self, root: Prefix, row: Prefix) -> int:
        return len(root)


class AcceptsFirstChild(Step):
    """The walk descends without looking at what was drawn."""

    def walk(self, tree: DraftTree, drawn: list[int]) -> tuple[tuple[int, ...], int]:
        path: list[int] = []
        while (child := next((i for i, p in enumerate(tree.parents) if p == (path or [-1])[-1]), None)) is not None:
            path.append(child)
        return tuple(path), drawn[1 + path[-1]] if path else drawn[0]


class SharedChoiceNoise(Step):
    """All choices draw with the noise of choice 0."""

    def choice_key(self, choice: int) -> int:
        return 0


ROW_ERRORS = [
    SharedPenaltyRow,
    BonusFromRootRow,
    BonusFromNextRow,
    PositionOffByOne,
    SlotInsteadOfPosition,
    AcceptsFirstChild,
]


@pytest.mark.parametrize("check", [check_law, check_atoms], ids=lambda c: c.__name__)
@pytest.mark.parametrize("error", ROW_ERRORS, ids=lambda e: e.__name__)
def test_planted_row_error_is_caught(error: type[Step], check: Callable[[Step, Drafts], None]) -> None:
    with pytest.raises(AssertionError):
        for drafts in DRAFTERS:
            check(error(Target(4)), drafts)


def test_planted_shared_choice_noise_is_caught() -> None:
    check_law(SharedChoiceNoise(Target(3)), true_chain)  # each choice alone looks right
    with pytest.raises(AssertionError):
        check_choices(SharedChoiceNoise(Target(3)), true_chain)
