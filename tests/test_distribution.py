"""The law of drawn tokens, by counting draws: the real `draw_tokens` and `walk` on a small vocabulary.

20,000 answers with fixed seeds, three tokens each, against the joint law that the oracle's processors and truncation
give by multiplication: a chi-square test over pooled bins (expected ≥ 5). The seeds are fixed, so a p-value is a
constant of the code. Five errors that engines really had are planted in the same step and must be caught by the same
test with a fifth of the draws. tests/test_law.py proves the walk by enumeration; this one has real noise in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    fused: bool = False  # drawn by one call of the backend, where it has that

    @cached_property
    def asked(self) -> oracle.OracleParams:
        names = oracle.OracleParams.__dataclass_fields__
        return oracle.OracleParams(**{name: getattr(self.params, name) for name in names})

    def probs(self, prefix: Ids) -> oracle.Array:
        """The law of the next token by the oracle: exp of the logits that a draw sees, normalised."""
        logits = oracle.process(logits_of(prefix), PROMPT, prefix[len(PROMPT) :], self.asked)
        return np.exp(oracle.log_softmax(oracle.seen_by_draw(logits, self.asked)))


class Sampler:
    """Answers of one setting, step by step."""

    def __init__(self, setting: Setting, step: Step, num_answers: int) -> None:
        self.setting = setting
        self.step = step
        self.table = Table()
        self.ops: Any = load("auto")
        if not setting.fused or self.ops.sample is None:
            self.ops = NoiseOfAll(num_answers, setting.choices)
        self.request = Request(request_id="r", prompt_token_ids=PROMPT, params=setting.params)
        self._trees: dict[Ids, tuple[DraftTree, list[Ids], torch.Tensor]] = {}

    def answer(self, seed: int, choice: int, length: int) -> Ids:
        ids = list(PROMPT)
        history = History(self.request, ids) if needs_history(self.request) else None
        while len(ids) < len(PROMPT) + length:
            ids += self._run(tuple(ids), seed, choice, history)
        return tuple(ids[len(PROMPT) : len(PROMPT) + length])

    def _laid_out(self, root: Ids) -> tuple[DraftTree, list[Ids], torch.Tensor]:
        if root not in self._trees:
            tree = self.setting.drafts(self.table, root)
            paths: list[Ids] = [(), *tree.paths()]
            rows = torch.from_numpy(np.stack([self.table[root + path] for path in paths]))
            self._trees[root] = tree, paths, rows
        return self._trees[root]

    def _run(self, root: Ids, seed: int, choice: int, history: History | None) -> list[int]:
        tree, paths, rows = self._laid_out(root)
        draws = [
            Draw(
                row=row,
                draw_index=self.step.draw_index(root, root + path),
                choice=self.step.key_of(choice),
                seed=seed,
                params=self.setting.params,
                path=path,
                history=history,
            )
            for row, path in enumerate(paths)
        ]
        drawn = draw_tokens(rows, draws, self.ops)
        path, bonus = self.step.walk(tree, list(rows.numpy()), self.step.drawn(list(rows.numpy()), drawn))
        return [*(tree.token_ids[node] for node in path), bonus]


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
    counts = Counter(sampler.answer(seed, 0, LENGTH) for seed in range(num_answers))
    law = {}
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        probs = [sampler.setting.probs(PROMPT + answer[:i])[answer[i]] for i in range(LENGTH)]
        law[answer] = float(np.prod(probs))
    return chi_square(counts, law, num_answers)


def joint_of_choices(sampler: Sampler, num_answers: int) -> float:
    """The first token of three choices."""
    choices = range(sampler.setting.choices)
    counts = Counter(tuple(sampler.answer(seed, choice, 1)[0] for choice in choices) for seed in range(num_answers))
    first = sampler.setting.probs(PROMPT)
    law = {ids: float(np.prod(first[list(ids)])) for ids in itertools.product(range(VOCAB), repeat=len(choices))}
    return chi_square(counts, law, num_answers)


Joint = Callable[[Sampler, int], float]
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.4}
SETTINGS: dict[str, tuple[Setting, Joint]] = {
    "plain-chain": (Setting(SamplingParams(temperature=0.7), chain), joint_of_tokens),
    "plain-tree": (Setting(SamplingParams(temperature=1.5), tree, fused=True), joint_of_tokens),
    "top_p-tree": (Setting(SamplingParams(temperature=1.0, top_p=0.85), tree, fused=True), joint_of_tokens),
    "top_k-chain": (Setting(SamplingParams(temperature=1.5, top_k=3), chain), joint_of_tokens),
    "min_p-chain": (Setting(SamplingParams(temperature=0.7, min_p=0.05), chain, fused=True), joint_of_tokens),
    "penalties-tree": (Setting(SamplingParams(temperature=1.0, **PENALTIES), tree), joint_of_tokens),
    "choices": (Setting(SamplingParams(temperature=1.0), chain, choices=3), joint_of_choices),
}
THRESHOLD = 1e-4 / len(SETTINGS)  # Bonferroni


def p_value(name: str, step: Step, num_answers: int) -> float:
    setting, joint = SETTINGS[name]
    return joint(Sampler(setting, step, num_answers), num_answers)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_joint_law_is_the_targets(name: str) -> None:
    assert p_value(name, Step(), NUM_ANSWERS) > THRESHOLD


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
        for seed in range(300):
            sampler.answer(seed, 0, LENGTH)
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
    """By every setting of the kind, with a fifth of the draws."""
    names = [name for name in SETTINGS if name.endswith(kind)]
    values = {name: p_value(name, error(), NUM_ANSWERS // 5) for name in names[:2]}
    assert max(values.values()) <= THRESHOLD, values
