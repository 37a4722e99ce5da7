"""Speculation never changes a token: every drafter × greedy or sampled × situation × dtype, id for id.

The cells are generated. The reference of a request is the request alone, without drafts, in a roomy engine
without prefix cache; a cell must give the same ids in its situation with speculation off and on, and must prove
that what its name claims happened (a preemption, a page hit, a rejected draft…). A subset in which every pair of
factor values meets runs by default, the rest under `make exactness`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from drafters import AdversarialDrafter, AlwaysWrongDrafter, CountingDrafter, OracleDrafter, RandomTreeDrafter
from harness import EngineHarness, Run

from specserve.request import Request, SamplingParams, SpeculationParams

DRAFTERS = ("oracle", "always_wrong", "random_tree", "adversarial", "ngram")
MODES = ("greedy", "sampled")
DTYPES = ("float32", "bfloat16")
TARGET = "target"
ALPHABET = 250  # ids of prompts; below the tiny tokenizer's vocabulary


# ---- requests -------------------------------------------------------------------------------------------------------


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """A phrase said over and over, so that n-grams recur."""
    rng = random.Random(seed)
    phrase = [rng.randrange(3, ALPHABET) for _ in range(7)]
    return tuple(phrase[i % len(phrase)] for i in range(length))


def request(name: str, mode: str, prompt_ids: tuple[int, ...], seed: int = 7, **params: Any) -> Request:
    """The mode is every request's; what a request adds is its own."""
    settings: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0 if mode == "greedy" else 0.8}
    return Request(
        request_id=name, prompt_token_ids=prompt_ids, params=SamplingParams(**(settings | {"seed": seed} | params))
    )


def mates(mode: str) -> list[Request]:
    """Eight others, of every kind."""
    made = [
        request("m0", mode, prompt(20, 5), max_tokens=30, temperature=0.0),
        request("m1", mode, prompt(21, 33), max_tokens=25, temperature=1.1, top_k=5),
        request("m2", mode, prompt(22, 16), max_tokens=45, temperature=0.7, top_p=0.8, seed=2**64 - 1),
        request("m3", mode, prompt(23, 17), max_tokens=20, temperature=0.9, min_p=0.1),
        request("m4", mode, prompt(24, 50), max_tokens=28, n=2, temperature=1.0),
        request("m5", mode, prompt(25, 9), max_tokens=40, ignore_eos=False, min_tokens=6, temperature=1.5),
        request("m6", mode, prompt(26, 24), max_tokens=1),
        request("m7", mode, prompt(27, 64), max_tokens=33, stop_token_ids=tuple(range(3, 60))),
    ]
    made[1] = replace(made[1], speculation=SpeculationParams(drafter="off"))
    made[3] = replace(made[3], speculation=SpeculationParams(num_draft_tokens=1))
    made[4] = replace(made[4], speculation=SpeculationParams(num_draft_tokens=12))
    return made


@dataclass(frozen=True)
class Situation:
    """Who else is there, on what engine, and the proof that it mattered."""

    requests: Callable[[str], list[Request]]
    claim: Callable[[EngineHarness, Run], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Mapping[str, int] = field(default_factory=dict)


def _alone(harness: EngineHarness, run: Run) -> None:
    assert len(run.answers) == 3
    assert harness.max_sequences == 1


def _among_mates(harness: EngineHarness, run: Run) -> None:
    assert len(run.started) == 9
    assert harness.engine.metrics.max_rows_in_step >= 9


def _preempted(harness: EngineHarness, run: Run) -> None:
    assert harness.engine.metrics.num_preemptions >= 1


def _page_hit(harness: EngineHarness, run: Run) -> None:
    page_size = harness.engine.limits.page_size
    cached = {name: started.cached_tokens for name, started in run.started.items()}
    assert cached["during"] >= page_size and cached["after"] >= page_size
    # the same first page, then one with another last id; the same prompt of another tenant
    assert cached["near_miss"] == page_size and cached["salted"] == 0


def _chunked(harness: EngineHarness, run: Run) -> None:
    assert run.chunks[f"{TARGET}/0"] >= 2


def _copied_on_write(harness: EngineHarness, run: Run) -> None:
    assert len(run.answers) == 3
    assert harness.engine.metrics.num_copied_slots >= 1


SITUATIONS: dict[str, Situation] = {
    "alone": Situation(
        lambda mode: [request(f"{TARGET}{i}", mode, prompt(10 + i, 21 + i), seed=i) for i in range(3)],
        _alone,
        arrivals={f"{TARGET}{i}": 60 * i for i in range(3)},
    ),
    "mates": Situation(
        lambda mode: [request(TARGET, mode, prompt(1, 21)), *mates(mode)],
        _among_mates,
        arrivals={TARGET: 2, "m1": 1, "m4": 3, "m5": 3, "m7": 5},
    ),
    "preempted": Situation(
        lambda mode: [request(f"{TARGET}{i}", mode, prompt(30 + i, 13 + i), seed=i) for i in range(4)],
        _preempted,
        options={"page_size": 4, "num_pages": 30, "min_chunk": 4},
    ),
    "prefix_hit": Situation(
        lambda mode: [
            request("first", mode, prompt(1, 37)),
            request("during", mode, (*prompt(1, 37), 5, 6), seed=8),
            request("after", mode, (*prompt(1, 33), 9), seed=9),
            request("near_miss", mode, (*prompt(1, 31), 200, 5, 5), seed=10, max_tokens=15),
            replace(request("salted", mode, prompt(1, 37), seed=11, max_tokens=15), cache_salt="other"),
        ],
        _page_hit,
        arrivals={"during": 4, "after": 120, "near_miss": 121, "salted": 122},
    ),
    "chunked": Situation(
        lambda mode: [request("early", mode, prompt(40, 11)), request(TARGET, mode, prompt(1, 70))],
        _chunked,
        options={"max_num_batched_tokens": 24, "max_num_seqs": 4, "min_chunk": 8},
        arrivals={TARGET: 3},
    ),
    "n3": Situation(lambda mode: [request(TARGET, mode, prompt(1, 21), n=3, max_tokens=60)], _copied_on_write),
}


# ---- drafters and what each must show -------------------------------------------------------------------------------


def make_drafter(name: str, answers: Mapping[str, Sequence[int]], vocab_size: int) -> CountingDrafter | str:
    """A drafter that knows the answers, or the name of a product drafter."""
    match name:
        case "oracle":
            return OracleDrafter(answers)
        case "always_wrong":
            return AlwaysWrongDrafter(answers, vocab_size)
        case "random_tree":
            return RandomTreeDrafter(3, vocab_size, answers)
        case "adversarial":
            return AdversarialDrafter(
                answers, vocab_size, lambda seed, index, choice: oracle.gumbel(seed, index, choice, vocab_size)
            )
        case _:
            return name


def check_drafts(name: str, drafter: CountingDrafter | str, run: Run) -> None:
    """The statistics of the run are what the drafter's name promises."""
    stats = [end.speculation for end in run.finished.values()]
    drafted, accepted = sum(s.num_draft_tokens for s in stats), sum(s.num_accepted_tokens for s in stats)
    assert drafted >= 1
    for s in stats:
        assert sum(s.drafted_per_position) == s.num_draft_tokens
        assert sum(s.accepted_per_position) == s.num_accepted_tokens
        assert s.inactive_reason is None or s.num_drafts == 0
    if name == "oracle":
        assert accepted == drafted
    elif name == "always_wrong":
        assert accepted == 0
    else:
        assert 1 <= accepted < drafted
    if isinstance(drafter, RandomTreeDrafter):
        assert drafter.num_non_prefix_paths >= 1


# ---- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    drafter: str
    mode: str
    situation: str
    dtype: str

    @property
    def values(self) -> tuple[str, ...]:
        return (self.drafter, self.mode, self.situation, self.dtype)

    def pairs(self) -> set[tuple[str, str]]:
        return set(itertools.combinations(self.values, 2))


ALL_CELLS = [Cell(*values) for values in itertools.product(DRAFTERS, MODES, SITUATIONS, DTYPES)]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Greedy cover: take the cell with most pairs not seen yet, the first of equals, until every pair was seen."""
    missing = set().union(*(cell.pairs() for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(cell.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    return chosen


DEFAULT_CELLS = frozenset(pairwise(ALL_CELLS))


class References:
    """Runs without drafts, each made once: every request alone, and every situation as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone: dict[tuple[str, Request], Run] = {}
        self._situations: dict[tuple[str, str, str], Run] = {}

    def alone(self, item: Request, dtype: str) -> Run:
        if (dtype, item) not in self._alone:
            harness = EngineHarness(self.folder, dtype=dtype, enable_prefix_caching=False)
            self._alone[dtype, item] = harness.run([item])
        return self._alone[dtype, item]

    def situation(self, name: str, mode: str, dtype: str) -> Run:
        """Speculation off in the situation; equal to each request alone."""
        if (name, mode, dtype) not in self._situations:
            situation = SITUATIONS[name]
            requests = situation.requests(mode)
            harness = EngineHarness(self.folder, dtype=dtype, **situation.options)
            run = harness.run(requests, situation.arrivals)
            situation.claim(harness, run)
            for item in requests:
                for key, ids in self.alone(item, dtype).answers.items():
                    assert run.answers[key] == ids, f"off: {key} in situation {name} is not what it is alone"
            self._situations[name, mode, dtype] = run
        return self._situations[name, mode, dtype]


@pytest.fixture(scope="module")
def references(sharp_llama: Path) -> References:
    return References(sharp_llama)


def cell_params() -> list[Any]:
    return [
        pytest.param(cell, id="-".join(cell.values), marks=() if cell in DEFAULT_CELLS else pytest.mark.slow)
        for cell in ALL_CELLS
    ]


@pytest.mark.parametrize("cell", cell_params())
def test_on_equals_off(cell: Cell, references: References) -> None:
    situation = SITUATIONS[cell.situation]
    requests = situation.requests(cell.mode)
    off = references.situation(cell.situation, cell.mode, cell.dtype)
    vocab_size = vocab_of(references.folder)
    drafter = make_drafter(cell.drafter, off.full(requests), vocab_size)
    harness = EngineHarness(references.folder, drafter, dtype=cell.dtype, **situation.options)
    on = harness.run(requests, situation.arrivals)
    assert on.answers == off.answers
    assert on.texts == off.texts
    assert {key: end.reason for key, end in on.finished.items()} == {
        key: end.reason for key, end in off.finished.items()
    }
    situation.claim(harness, on)
    check_drafts(cell.drafter, drafter, on)
    if cell.situation == "n3":
        check_choices(cell, on, references)


def vocab_of(folder: Path) -> int:
    from specserve.models.decoder import DecoderConfig

    return DecoderConfig.from_folder(folder).vocab_size


def check_choices(cell: Cell, run: Run, references: References) -> None:
    """Choice 0 is what n = 1 gives; sampled choices differ from each other."""
    single = references.alone(request(TARGET, cell.mode, prompt(1, 21), max_tokens=60), cell.dtype)
    answers = [run.answers[f"{TARGET}/{choice}"] for choice in range(3)]
    assert answers[0] == single.answers[f"{TARGET}/0"]
    num_different = len({tuple(answer) for answer in answers})
    assert num_different == (1 if cell.mode == "greedy" else 3)


def test_the_default_cells_cover_every_pair() -> None:
    covered = set().union(*(cell.pairs() for cell in DEFAULT_CELLS))
    assert covered == set().union(*(cell.pairs() for cell in ALL_CELLS))
    assert len(ALL_CELLS) == 5 * 2 * 6 * 2
    assert len(DEFAULT_CELLS) <= 40


# ---- the demo model, wide -------------------------------------------------------------------------------------------


@pytest.mark.demo
@pytest.mark.parametrize("mode", ["greedy", pytest.param("sampled", marks=pytest.mark.slow)])
def test_demo_model_in_bf16_with_a_step_of_48_rows(mode: str, demo_folder: Path) -> None:
    """Library GEMMs change their bits at some row count; ours may not."""
    requests = [request(f"d{i}", mode, prompt(50 + i, 12 + i), seed=i, max_tokens=12) for i in range(4)]
    options = {"dtype": "bfloat16", "num_pages": 64}
    off = EngineHarness(demo_folder, **options).run(requests)
    vocab_size = vocab_of(demo_folder)
    drafter = RandomTreeDrafter(5, vocab_size, off.full(requests), num_nodes=15)
    harness = EngineHarness(demo_folder, drafter, num_draft_tokens=15, **options)
    on = harness.run(requests)
    assert on.answers == off.answers
    assert harness.engine.metrics.max_rows_in_step >= 48
    check_drafts("random_tree", drafter, on)
