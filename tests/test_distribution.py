"""The law of drawn tokens, by counting draws: the real `draw_tokens` and `walk` on a small vocabulary.

20,000 answers with fixed seeds, three tokens each, against the joint law that the oracle's processors and truncation
give by multiplication: a chi-square test over pooled bins (expected ≥ 5). The seeds are fixed, so a p-value is a
constant of the code. Five errors that engines really had are planted in the same step and must be caught by the same
test with a fifth of the draws. tests/test_law.py proves the walk by enumeration; this one has real noise in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from specserve_kernels import PURPOSE_TARGET, load

from specserve.processors import History, needs_history
from specserve.proposal import DraftTree
from specserve.request import Request, SamplingParams
from specserve.sample import Draw, draw_tokens
from specserve.verify import walk

VOCAB = 5
LENGTH = 3
PROMPT = (0, 3)
NUM_ANSWERS = 20_000
MIN_EXPECTED = 5.0
TOGETHER = 250  # answers in one call of draw_tokens
Ids = tuple[int, ...]


def logits_of(prefix: Ids) -> oracle.Array:
    """A made-up model: fp32 logits that depend on the whole prefix."""
    state = sum((token + 1) * 31**i for i, token in enumerate(reversed(prefix)))
    return np.random.default_rng(state).normal(0.0, 1.2, VOCAB).astype(np.float32)


class Table:
    """Each prefix's logits, made once."""

    def __init__(self) -> None:
        self._rows: dict[Ids, oracle.Array] = {}

    def __getitem__(self, prefix: Ids) -> oracle.Array:
        if prefix not in self._rows:
            self._rows[prefix] = logits_of(prefix)
        return self._rows[prefix]


class NoiseOfAll:
    """The real noise op, asked once for all answers and draw indices, for a sampler composed of numpy operations."""

    name = "batched"
    sample = None

    def __init__(self, num_answers: int, num_choices: int) -> None:
        self.depths = range(len(PROMPT), len(PROMPT) + 2 * LENGTH + 2)
        keys = list(itertools.product(range(num_answers), self.depths, range(num_choices)))
        columns = [torch.tensor(column) for column in zip(*keys, strict=True)]
        rows = load("auto").noise(*columns, PURPOSE_TARGET, VOCAB)
        self._rows = rows.reshape(num_answers, len(self.depths), num_choices, VOCAB)

    def noise(self, seeds: Any, indices: Any, choices: Any, purpose: int, vocab_size: int) -> torch.Tensor:
        assert (purpose, vocab_size) == (PURPOSE_TARGET, VOCAB)
        return self._rows[int(seeds[0]), int(indices[0]) - self.depths[0], int(choices[0])][None]


Drafts = Callable[[Table, Ids], DraftTree]


def best(row: oracle.Array, count: int) -> list[int]:
    return np.argsort(-row, kind="stable")[:count].tolist()


def chain(table: Table, prefix: Ids) -> DraftTree:
    """What is most likely, two deep: a whole chain and its bonus are the three tokens."""
    ids: list[int] = []
    for _ in range(LENGTH - 1):
        ids += best(table[(*prefix, *ids)], 1)
    return DraftTree.chain(ids, "chain")


def tree(table: Table, prefix: Ids) -> DraftTree:
    """Two ids under the root, the less likely first, and two under each of them."""
    ids, parents = best(table[prefix], 2)[::-1], [-1, -1]
    for parent in (0, 1):
        ids += best(table[(*prefix, ids[parent])], 2)[::-1]
        parents += [parent, parent]
    return DraftTree(tuple(ids), tuple(parents), ("tree",) * len(ids))


class Step:
    """One speculative step; a planted error overrides one decision of it."""

    def draw_index(self, root: Ids, row: Ids) -> int:
        return len(row)

    def key_of(self, choice: int) -> int:
        return choice

    def drawn(self, rows: Sequence[oracle.Array], ids: list[int]) -> list[int]:
        return ids

    def walk(self, tree: DraftTree, rows: Sequence[oracle.Array], drawn: list[int]) -> tuple[Ids, int]:
        return walk(tree, drawn)


@dataclass(frozen=True)
class Setting:
    params: SamplingParams
    drafts: Drafts
    choices: int = 1
    composed: bool = False  # drawn by numpy operations (slow) also where the backend has one call for it

    @cached_property
    def asked(self) -> oracle.OracleParams:
        names = oracle.OracleParams.__dataclass_fields__
        return oracle.OracleParams(**{name: getattr(self.params, name) for name in names})

    def probs(self, prefix: Ids) -> oracle.Array:
        """The law of the next token by the oracle: exp of the logits that a draw sees, normalised."""
        logits = oracle.process(logits_of(prefix), PROMPT, prefix[len(PROMPT) :], self.asked)
        return np.exp(oracle.log_softmax(oracle.seen_by_draw(logits, self.asked)))


@dataclass
class Answer:
    seed: int
    choice: int
    ids: list[int] = field(default_factory=lambda: list(PROMPT))
    history: History | None = None


class Sampler:
    """Answers of one setting, in lock-step: many answers share a call of `draw_tokens`, as in a busy engine."""

    def __init__(self, setting: Setting, step: Step, num_answers: int) -> None:
        self.setting = setting
        self.step = step
        self.table = Table()
        self.ops: Any = load("auto")
        if setting.composed or self.ops.sample is None:
            self.ops = NoiseOfAll(num_answers, setting.choices)
        self.request = Request(request_id="r", prompt_token_ids=PROMPT, params=setting.params)
        self._trees: dict[Ids, tuple[DraftTree, list[Ids], oracle.Array]] = {}

    def answers(self, choice: int, length: int, seeds: range) -> Iterator[Ids]:
        for start in range(seeds.start, seeds.stop, TOGETHER):
            group = [Answer(seed, choice) for seed in seeds[start : start + TOGETHER]]
            for answer in group:
                if needs_history(self.request):
                    answer.history = History(self.request, answer.ids)
            while open_ones := [answer for answer in group if len(answer.ids) < len(PROMPT) + length]:
                self._run(open_ones)
            yield from (tuple(answer.ids[len(PROMPT) : len(PROMPT) + length]) for answer in group)

    def _laid_out(self, root: Ids) -> tuple[DraftTree, list[Ids], oracle.Array]:
        if root not in self._trees:
            tree = self.setting.drafts(self.table, root)
            paths: list[Ids] = [(), *tree.paths()]
            self._trees[root] = tree, paths, np.stack([self.table[root + path] for path in paths])
        return self._trees[root]

    def _run(self, group: list[Answer]) -> None:
        """One step of all of them."""
        laid_out = [self._laid_out(tuple(answer.ids)) for answer in group]
        draws: list[Draw] = []
        for answer, (_, paths, _) in zip(group, laid_out, strict=True):
            root = tuple(answer.ids)
            draws += [
                Draw(
                    row=len(draws) + row,
                    draw_index=self.step.draw_index(root, root + path),
                    choice=self.step.key_of(answer.choice),
                    seed=answer.seed,
                    params=self.setting.params,
                    path=path,
                    history=answer.history,
                )
                for row, path in enumerate(paths)
            ]
        drawn = iter(draw_tokens(torch.from_numpy(np.concatenate([rows for _, _, rows in laid_out])), draws, self.ops))
        for answer, (tree, paths, rows) in zip(group, laid_out, strict=True):
            path, bonus = self.step.walk(tree, rows, self.step.drawn(rows, [next(drawn) for _ in paths]))
            answer.ids += [*(tree.token_ids[node] for node in path), bonus]


def chi_square(counts: Counter[Ids], law: dict[Ids, float], total: int) -> float:
    """p-value of the counts; outcomes of little expectation are pooled, impossible ones are fatal."""
    if any(law[answer] == 0.0 for answer in counts):
        return 0.0
    bins: list[tuple[float, int]] = []
    pooled, seen = 0.0, 0
    for answer in sorted(law, key=lambda a: law[a]):
        pooled, seen = pooled + total * law[answer], seen + counts[answer]
        if pooled >= MIN_EXPECTED:
            bins.append((pooled, seen))
            pooled, seen = 0.0, 0
    bins[-1] = (bins[-1][0] + pooled, bins[-1][1] + seen)
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    assert len(bins) >= 10
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def joint_of_tokens(sampler: Sampler, num_answers: int) -> float:
    """x1 x2 x3 of one choice."""
    counts = Counter(sampler.answers(0, LENGTH, range(num_answers)))
    law = {}
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        probs = [sampler.setting.probs(PROMPT + answer[:i])[answer[i]] for i in range(LENGTH)]
        law[answer] = float(np.prod(probs))
    return chi_square(counts, law, num_answers)


def joint_of_choices(sampler: Sampler, num_answers: int) -> float:
    """The first token of three choices."""
    choices = range(sampler.setting.choices)
    columns = [[ids[0] for ids in sampler.answers(choice, 1, range(num_answers))] for choice in choices]
    counts = Counter(zip(*columns, strict=True))
    first = sampler.setting.probs(PROMPT)
    law = {ids: float(np.prod(first[list(ids)])) for ids in itertools.product(range(VOCAB), repeat=len(choices))}
    return chi_square(counts, law, num_answers)


Joint = Callable[[Sampler, int], float]
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.4}
SETTINGS: dict[str, tuple[Setting, Joint]] = {
    "plain-chain": (Setting(SamplingParams(temperature=0.7), chain), joint_of_tokens),
    "plain-tree": (Setting(SamplingParams(temperature=1.5), tree), joint_of_tokens),
    "top_p-tree": (Setting(SamplingParams(temperature=1.0, top_p=0.85), tree), joint_of_tokens),
    "top_k-chain": (Setting(SamplingParams(temperature=1.5, top_k=3), chain), joint_of_tokens),
    "min_p-chain": (Setting(SamplingParams(temperature=0.7, min_p=0.05), chain), joint_of_tokens),
    "penalties-tree": (Setting(SamplingParams(temperature=1.0, **PENALTIES), tree), joint_of_tokens),
    "composed-chain": (Setting(SamplingParams(temperature=1.0, top_p=0.9), chain, composed=True), joint_of_tokens),
    "choices": (Setting(SamplingParams(temperature=1.0), chain, choices=3), joint_of_choices),
}
THRESHOLD = 1e-4 / len(SETTINGS)  # Bonferroni


def p_value(name: str, step: Step, num_answers: int) -> float:
    setting, joint = SETTINGS[name]
    return joint(Sampler(setting, step, num_answers), num_answers)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_law_is_the_targets(name: str) -> None:
    num_answers = NUM_ANSWERS // 4 if SETTINGS[name][0].composed else NUM_ANSWERS
    assert p_value(name, Step(), num_answers) > THRESHOLD


def test_the_drafts_matter() -> None:
    """Whole drafts and empty paths both occur, or the law would be that of plain decoding."""
    for drafts in (chain, tree):
        lengths: Counter[int] = Counter()

        class Watched(Step):
            def walk(self, tree: DraftTree, rows: Sequence[oracle.Array], drawn: list[int]) -> tuple[Ids, int]:
                path, bonus = walk(tree, drawn)
                lengths[len(path)] += 1  # noqa: B023  (used within the round)
                return path, bonus

        sampler = Sampler(Setting(SamplingParams(), drafts), Watched(), 300)
        assert len(list(sampler.answers(0, LENGTH, range(300)))) == 300
        assert min(lengths[0], lengths[1], lengths[2]) >= 30


# ---- planted errors -------------------------------------------------------------------------------------------------


class SharedDepths(Step):
    """All rows of a step share one noise vector."""

    def draw_index(self, root: Ids, row: Ids) -> int:
        return len(root)


class BonusOfPreviousRow(Step):
    """The row behind the whole draft draws with the noise of the row before it."""

    def draw_index(self, root: Ids, row: Ids) -> int:
        return len(row) - (len(row) - len(root) == LENGTH - 1)


class GreedyVerify(Step):
    """Rows of a draft yield their most likely id at every temperature."""

    def drawn(self, rows: Sequence[oracle.Array], ids: list[int]) -> list[int]:
        return [int(np.argmax(row)) for row in rows]


class AcceptedAgainstArgmax(Step):
    """A draft token is kept where it is the target's most likely id, and only the bonus is drawn."""

    def walk(self, tree: DraftTree, rows: Sequence[oracle.Array], drawn: list[int]) -> tuple[Ids, int]:
        path, _ = walk(tree, [int(np.argmax(row)) for row in rows])
        return path, drawn[1 + path[-1] if path else 0]


class SharedChoices(Step):
    """All choices draw with the noise of choice 0."""

    def key_of(self, choice: int) -> int:
        return 0


PLANTED = [
    *itertools.product([SharedDepths, BonusOfPreviousRow, GreedyVerify, AcceptedAgainstArgmax], ["chain", "tree"]),
    (SharedChoices, "choices"),
]


@pytest.mark.parametrize(("error", "kind"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_errors_are_caught(error: type[Step], kind: str) -> None:
    """By a setting of the kind, with a fifth of the draws."""
    names = [name for name in SETTINGS if name.endswith(kind)]
    values = {name: p_value(name, error(), NUM_ANSWERS // 5) for name in names[:2]}
    assert min(values.values()) <= THRESHOLD, values
