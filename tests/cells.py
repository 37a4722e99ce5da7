"""What the exactness matrices are made of: requests, situations, drafters, and how cells are chosen.

A cell is a tuple of factor values. A situation says who is there and on what engine, and proves afterwards that what
its name claims happened (a preemption, a page hit, several chunks…); a drafter's name promises what it must have
drafted. `pairwise` picks the cells that run by default: every pair of factor values meets in one of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import oracle
import pytest
from drafters import AdversarialDrafter, AlwaysWrongDrafter, CountingDrafter, OracleDrafter, RandomTreeDrafter
from harness import EngineHarness, Run
from oracle import Oracle, OracleLogprobs, OracleOutput, OracleParams

from specserve.events import TokenLogprobs
from specserve.models.decoder import DecoderConfig
from specserve.request import Request, SamplingParams, SpeculationParams
from specserve.tokenizer import Tokenizer

DRAFTERS = ("oracle", "always_wrong", "random_tree", "adversarial", "ngram")
MODES = ("greedy", "sampled")
TARGET = "target"
ALPHABET = 250  # ids of prompts; below the tiny tokenizer's vocabulary
LOGPROB_TOLERANCE = 1e-3


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
        request("m0", mode, prompt(20, 5), max_tokens=30, temperature=0.0, frequency_penalty=0.7),
        request("m1", mode, prompt(21, 33), max_tokens=25, temperature=1.1, top_k=5),
        request(
            "m2", mode, prompt(22, 16), max_tokens=45, temperature=0.7, top_p=0.8, seed=2**64 - 1, logit_bias={9: 4.0}
        ),
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


Claim = Callable[[EngineHarness, Run, Mapping[str, Request]], None]


@dataclass(frozen=True)
class Situation:
    """Who is there, on what engine, and the proof that it mattered. `subjects` are those a test is about."""

    requests: Callable[[str], list[Request]]
    claim: Claim
    subjects: tuple[str, ...] = (TARGET,)
    options: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Mapping[str, int] = field(default_factory=dict)


def _alone(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    assert len(run.answers) == 3
    assert harness.max_sequences == 1


def _among_mates(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    assert len(run.started) == 9
    assert harness.engine.metrics.max_rows_in_step >= 9


def _preempted(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    assert harness.engine.metrics.num_preemptions >= 1
    assert any(harness.preempted[f"{name}/0"] for name in SITUATIONS["preempted"].subjects)


def _page_hit(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    page_size = harness.engine.limits.page_size
    cached = {name: started.cached_tokens for name, started in run.started.items()}
    for name in ("during", "after"):
        # who wants the log-probabilities of its prompt has to compute it
        reports = requests[name].params.prompt_logprobs is not None
        assert cached[name] == 0 if reports else cached[name] >= page_size
    # the same first page, then one with another last id; the same prompt of another tenant
    assert cached["near_miss"] == page_size and cached["salted"] == 0


def _chunked(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    assert run.chunks[f"{TARGET}/0"] >= 2


def _copied_on_write(harness: EngineHarness, run: Run, requests: Mapping[str, Request]) -> None:
    assert len(run.answers) == 3
    assert harness.engine.metrics.num_copied_slots >= 1


SITUATIONS: dict[str, Situation] = {
    "alone": Situation(
        lambda mode: [request(f"{TARGET}{i}", mode, prompt(10 + i, 21 + i), seed=i) for i in range(3)],
        _alone,
        subjects=(f"{TARGET}0", f"{TARGET}1", f"{TARGET}2"),
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
        subjects=tuple(f"{TARGET}{i}" for i in range(4)),
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
        subjects=("during", "after"),
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

Cell = TypeVar("Cell", bound=tuple[str, ...])


def pairs(cell: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.combinations(cell, 2))


def all_pairs(cells: Sequence[tuple[str, ...]]) -> set[tuple[str, str]]:
    return set().union(*map(pairs, cells))


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Greedy cover: take the cell with most pairs not seen yet, the first of equals, until every pair was seen."""
    missing = all_pairs(cells)
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def cell_params(cells: Sequence[tuple[str, ...]], default: Sequence[tuple[str, ...]]) -> list[Any]:
    """All cells for parametrize; those that are not run by default are marked slow."""
    chosen = frozenset(default)
    return [pytest.param(cell, id="-".join(cell), marks=() if cell in chosen else pytest.mark.slow) for cell in cells]


def vocab_of(folder: Path) -> int:
    return DecoderConfig.from_folder(folder).vocab_size


# ---- the oracle's answers -------------------------------------------------------------------------------------------


def oracle_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters by name; one that the oracle does not know must have its default."""
    known = {f.name for f in fields(OracleParams)}
    default = SamplingParams()
    # n is asked choice by choice, bad words as ids
    unknown = [f.name for f in fields(params) if f.name not in known | {"n", "bad_words"}]
    changed = [name for name in unknown if getattr(params, name) != getattr(default, name)]
    assert not changed, f"the oracle does not know {changed}"
    return {f.name: getattr(params, f.name) for f in fields(params) if f.name in known}


class OracleAnswers:
    """What the oracle says to every request, each asked once."""

    def __init__(self, folder: Path) -> None:
        self.oracle = Oracle(folder)
        self.tokenizer = Tokenizer(folder)
        self._known: dict[tuple[str, int], OracleOutput] = {}

    def of(self, request: Request, choice: int = 0, likely: Sequence[int] = ()) -> OracleOutput:
        """`likely`: what somebody else answered; it saves time where it is right."""
        key = (repr(request), choice)
        if key not in self._known:
            if likely:
                self.oracle.foresee([*request.prompt_token_ids, *likely])
            self._known[key] = self.oracle.generate(
                request.prompt_token_ids,
                choice=choice,
                eos_token_ids=self.tokenizer.eos_token_ids,
                bad_word_ids=request.bad_word_ids,
                decode=self.tokenizer.decode,
                **oracle_params(request.params),
            )
        return self._known[key]


def compare_report(told: TokenLogprobs, wanted: OracleLogprobs) -> None:
    """Values within the tolerance; of the top ids those that no such error could have changed."""
    assert told.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_TOLERANCE)
    assert told.top_logprobs == pytest.approx(wanted.top_logprobs, abs=LOGPROB_TOLERANCE)
    assert told.chosen_logprobs == pytest.approx(wanted.chosen_logprobs, abs=LOGPROB_TOLERANCE)
    assert len(told.top_ids) == len(wanted.top_ids)
    near = LOGPROB_TOLERANCE + min(wanted.top_logprobs, default=0.0)
    sure = {i for i, p in zip(wanted.top_ids, wanted.top_logprobs, strict=True) if p > near}
    assert sure <= set(told.top_ids)


def compare_logprobs(run: Run, request: Request, choice: int, expected: OracleOutput) -> None:
    """Of the answer and of the prompt, where they were asked for; None where not."""
    tokens = run.tokens[f"{request.request_id}/{choice}"]
    if request.params.logprobs is None:
        assert all(token.logprobs is None for token in tokens)
    else:
        for token, wanted in zip(tokens, expected.logprobs, strict=True):
            compare_report(token.logprobs, wanted)
    told = run.started[request.request_id].prompt_logprobs
    assert (told is None) == (request.params.prompt_logprobs is None)
    if told is not None and expected.prompt_logprobs is not None:
        assert told[0] is None and len(told) == len(request.prompt_token_ids)
        for report, wanted_row in zip(told[1:], expected.prompt_logprobs[1:], strict=True):
            assert report is not None and wanted_row is not None
            compare_report(report, wanted_row)
