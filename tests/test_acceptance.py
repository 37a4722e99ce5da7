"""`specserve acceptance`: its figures are those of the events, its estimates those worked out by hand, its words fit.

No speed is asserted: where times matter, the engine's clock is one that counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doors.fake_engine import Loaded
from doors.serving import Client, serving
from tiny import TinyLlama
from typer.testing import CliRunner, Result

from specserve import engine as engine_module
from specserve.acceptance.attach import counted
from specserve.acceptance.compare import compared, table_of
from specserve.acceptance.figures import Figures, Pace, figures_of, interval, speedup_of
from specserve.acceptance.fixed import StepTimes, alpha, best_fixed, fixed_lengths, formula_length, gamma
from specserve.acceptance.measure import measure
from specserve.acceptance.page import page
from specserve.acceptance.questions import MT_BENCH, Settings, chosen, cut
from specserve.acceptance.records import PLAIN, Answer, Draft, Side, Step, loops
from specserve.acceptance.report import result_of, tables, text
from specserve.acceptance.verdict import verdict
from specserve.build import Built, build
from specserve.cli import app
from specserve.config import EngineConfig
from specserve.errors import ConfigError, EngineFault, InvalidRequest
from specserve.events import Delta, Event, Finished, FinishReason, SpeculationStats
from specserve.metrics import count_step
from specserve.proposal import DraftTree
from specserve.request import Request
from specserve.tables import cell
from specserve.v1 import inference_pb2 as pb

NGRAM, COLD = Side(drafter="ngram"), Side(drafter="ngram", cold=True)
PROMPTS = [("copy", "the world the world the world"), ("talk", "Hello " * 5), ("talk", "What and the other?")]
SETTINGS = Settings(max_tokens=24, num_draft_tokens=4)
ABOUT: dict[str, Any] = {
    "model": "tiny", "temperature": 0.0,
    "provenance": {"environment": "environment: <test>", "date": "today", "commit": "none", "seed": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama) -> str:
    return str(tiny_llama(layers=1, seed=3))


@pytest.fixture(scope="module")
def built(folder: str) -> Built:
    return build(EngineConfig.from_options(model=folder, drafter="ngram", kv_cache_gib=0.01))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"category": name, "turns": [text, "x"]}) + "\n" for name, text in PROMPTS))
    return path


@pytest.fixture
def seen(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, list[Event]]]:
    """Every request that the engine gets, with its events."""
    found: list[tuple[Request, list[Event]]] = []
    submit, step = built.engine.submit, built.engine.step

    def submit_seen(request: Request, grammar: Any = None) -> None:
        found.append((request, []))
        submit(request, grammar)

    def step_seen() -> list[Event]:
        events = step()
        found[-1][1].extend(events)
        return events

    monkeypatch.setattr(built.engine, "submit", submit_seen)
    monkeypatch.setattr(built.engine, "step", step_seen)
    return found


@pytest.fixture
def counting_clock(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it one second later."""
    ticks = itertools.count()
    monkeypatch.setattr(built.engine, "clock", lambda: float(next(ticks)))
    monkeypatch.setattr(built.engine.drafting, "_clock", built.engine.clock)


def stats_of(drafted: list[int], accepted: list[int], **more: Any) -> SpeculationStats:
    given: dict[str, Any] = {
        "num_draft_tokens": sum(drafted), "num_accepted_tokens": sum(accepted),
        "drafted_per_position": drafted, "accepted_per_position": accepted,
    }  # fmt: skip
    return SpeculationStats(drafter="ngram", **{**given, **more})


def answer(side: Side = PLAIN, prompt: str = "p", **more: Any) -> Answer:
    given: dict[str, Any] = {
        "category": "c", "token_ids": (1, 2, 3), "reason": FinishReason.LENGTH, "decode_seconds": 2.0, "num_decoded": 2,
        "stats": SpeculationStats("off", 2, 2, steps_by_tokens=[2]),
    }  # fmt: skip
    return Answer(prompt=prompt, side=side, **{**given, **more})


def times_of(**seconds: float) -> StepTimes:
    """`r1=2.0`: a step of one row takes 2 s."""
    return StepTimes(Step(int(rows[1:]), 0, 0, 1, each, 0.0, each) for rows, each in seconds.items())


# -- what is asked -------------------------------------------------------------------------------------------------


def test_prompts_lose_their_middle() -> None:
    assert cut(range(10), 10) == tuple(range(10))
    assert cut(range(100), 8) == (0, 1, 2, 3, 4, 5, 98, 99)
    assert cut(range(100), 1) == (99,)


def test_categories_take_turns_in_a_seeded_order() -> None:
    prompts = [(name, f"{name} {i}") for name in "abc" for i in range(5)]
    few = chosen(prompts, 6, seed=1)
    assert Counter(name for name, _ in few) == {"a": 2, "b": 2, "c": 2}
    assert few == chosen(prompts, 6, seed=1) == chosen(prompts, None, seed=1)[:6] != chosen(prompts, 6, seed=2)
    assert sorted(chosen(prompts, None, seed=1)) == sorted(prompts)
    assert chosen([("a", "x"), ("b", "x")], None, seed=1) == [("b", "x")], "a prompt is asked once"


def test_spec_bench_counts_mt_bench_as_one_category() -> None:
    prompts = [(name, name) for name in (*MT_BENCH, "qa")]
    assert Counter(name for name, _ in chosen(prompts, None, 0)) == {"mt_bench": 8, "qa": 1}
    assert {name for name, _ in chosen([("math", "1"), ("qa", "2")], None, 0)} == {"math", "qa"}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 48, True),
        ([*range(100), *([1, 2, 3] * 16)], True),
        ([*([1, 2, 3] * 16), 9], False),
        (list(range(16)) * 3, True),
        (list(range(17)) * 4, False),
        ([7] * 47, False),
    ],
)
def test_a_loop(ids: list[int], expected: bool) -> None:
    assert loops(tuple(ids)) is expected


# -- measuring -----------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_events(built: Built, seen: list[tuple[Request, list[Event]]]) -> None:
    answers = measure(built, PROMPTS, [NGRAM], SETTINGS)
    overall = result_of(answers, 0.0, 4)["sides"]["ngram"]["overall"]
    runs = [
        events
        for request, events in seen
        if request.speculation.drafter == "ngram" and "warm" not in request.cache_salt
    ]
    assert len(runs) == len(PROMPTS)
    # the first Delta is the prompt's token; each further one is a step with a root row
    steps = [delta.tokens for events in runs for delta in [e for e in events if isinstance(e, Delta)][1:]]
    accepted = sum(token.drafted for tokens in steps for token in tokens)
    assert accepted > 0, "the prompts repeat themselves"
    assert overall["num_steps"] == len(steps) and overall["num_accepted_tokens"] == accepted
    assert overall["num_committed_tokens"] == sum(map(len, steps)) == overall["num_tokens"] - len(PROMPTS)
    assert overall["acceptance_length"] == sum(map(len, steps)) / len(steps)
    sizes = Counter(map(len, steps))
    assert list(overall["steps_by_tokens"]) == [sizes[i] for i in range(1, max(sizes) + 1)]
    ends = [event.speculation for events in runs for event in events if isinstance(event, Finished)]
    drafted = sum(end.num_draft_tokens for end in ends)
    assert overall["num_draft_tokens"] == drafted and overall["acceptance_rate"] == accepted / drafted
    for position in overall["positions"]:
        at = position["position"] - 1
        counts = [sum(each[at] for each in lists if at < len(each)) for lists in (
            [end.drafted_per_position for end in ends], [end.accepted_per_position for end in ends]
        )]  # fmt: skip
        assert [position["drafted"], position["accepted"]] == counts
        assert position["rate"] == counts[1] / counts[0]
    assert overall["accepted_by_drafter"] == {"ngram": sum(len(d.path) for a in answers for d in a.drafts)}
    assert overall["num_different"] == 0


def test_categories_and_sides_are_told_apart(built: Built) -> None:
    answers = measure(built, PROMPTS, [NGRAM, COLD], SETTINGS)
    result = result_of(answers, 0.0, 4)
    assert list(result["sides"]) == ["off", "ngram", "ngram, cold"]
    assert {name: f["num_prompts"] for name, f in result["sides"]["ngram"]["categories"].items()} == {
        "copy": 1,
        "talk": 2,
    }
    assert result["drafter"] == "ngram"
    assert result["acceptance_length"] == result["sides"]["ngram"]["overall"]["acceptance_length"] > 1.0
    counts = ("num_steps", "num_draft_tokens", "num_accepted_tokens", "steps_by_tokens")
    for side in result["sides"].values():
        for name in counts[:3]:
            assert side["overall"][name] == sum(f[name] for f in side["categories"].values())
    # n-grams share nothing between requests, so cold is the same
    warm, cold = (result["sides"][label]["overall"] for label in ("ngram", "ngram, cold"))
    assert [warm[name] for name in counts] == [cold[name] for name in counts]
    assert result["sides"]["off"]["overall"]["acceptance_length"] == 1.0


def test_sides_take_turns_and_share_no_salt(built: Built, seen: list[tuple[Request, list[Event]]]) -> None:
    told: list[int] = []
    measure(built, PROMPTS, [NGRAM, COLD], SETTINGS, told.append)
    asked = [request for request, _ in seen[3:]]
    salts = [request.cache_salt for request in asked]
    off, warm = ["local: off"] * 3, ["local: ngram"] * 3
    cold = [f"local: ngram, cold {i}" for i in range(3)]
    assert salts == [
        off[0], warm[0], cold[0],
        warm[1], cold[1], off[1],
        cold[2], off[2], warm[2],
    ]  # fmt: skip
    assert {request.cache_salt for request, _ in seen[:3]}.isdisjoint(salts), "the warm-up leaves nothing behind"
    assert [request.params.seed for request in asked] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert told == list(range(1, 10))


@pytest.mark.usefixtures("counting_clock")
def test_times_are_those_of_the_engine(built: Built, seen: list[tuple[Request, list[Event]]]) -> None:
    """Between two looks at the clock lies one second: verifying takes one of each step, drafting up to three."""
    answers = measure(built, PROMPTS, [NGRAM], SETTINGS)
    figures = {side: figures_of(own, plain_of(answers), StepTimes([])) for side, own in sides_of(answers).items()}
    for side, found in figures.items():
        assert found.time is not None
        # the last token of an answer needs no draft, so some steps draft nothing
        draft_ms = found.time.draft_ms
        assert (0 < draft_ms <= 3e3) if side == NGRAM else draft_ms == 0
        assert found.time.verify_ms == 1e3
        assert (
            found.time.rest_ms == pytest.approx(found.time.step_ms - found.time.draft_ms - 1e3)
            and found.time.rest_ms > 0
        )
    drafted = [a for a in answers if a.side == NGRAM]
    seconds, tokens = sum(a.decode_seconds for a in drafted), sum(a.num_decoded for a in drafted)
    assert seconds == sum(step.seconds for a in drafted for step in a.steps)
    assert figures[NGRAM].ms_per_token == pytest.approx(1e3 * seconds / tokens)
    plain = [a for a in answers if a.side == PLAIN]
    per_token = sum(a.decode_seconds for a in plain) / sum(a.num_decoded for a in plain)
    assert figures[NGRAM].speedup == pytest.approx(per_token / (seconds / tokens)) and figures[PLAIN].speedup == 1.0


def plain_of(answers: list[Answer]) -> dict[str, Answer]:
    return {a.prompt: a for a in answers if a.side == PLAIN}


def sides_of(answers: list[Answer]) -> dict[Side, list[Answer]]:
    return {side: [a for a in answers if a.side == side] for side in dict.fromkeys(a.side for a in answers)}


def test_steps_and_drafts_agree_with_the_counts(built: Built) -> None:
    for found in measure(built, PROMPTS, [NGRAM], SETTINGS):
        assert len(found.steps) == found.stats.num_steps
        assert sum(step.num_drafted for step in found.steps) == found.stats.num_draft_tokens
        assert sum(step.num_committed for step in found.steps) == found.stats.num_committed_tokens == found.num_decoded
        assert all(step.num_rows == 1 + step.num_drafted for step in found.steps)
        # what the last step made of its draft is not told to drafters
        assert [len(draft.tree) for draft in found.drafts if draft.tree] == [
            step.num_drafted for step in found.steps[:-1] if step.num_drafted
        ]
        assert found.num_asked - found.num_unmatched == found.stats.num_drafts
        assert all(draft.cap == 4 for draft in found.drafts)


def test_the_engine_gets_its_drafters_back(built: Built) -> None:
    before = dict(built.engine.drafting.drafters)
    measure(built, PROMPTS[:1], [NGRAM], SETTINGS)
    assert built.engine.drafting.drafters == before
    with pytest.raises(InvalidRequest, match="draft"):
        measure(built, PROMPTS[:1], [Side(drafter="ngrim")], SETTINGS)
    assert built.engine.drafting.drafters == before and not built.engine.has_work()


def test_long_prompts_are_cut(built: Built, seen: list[tuple[Request, list[Event]]]) -> None:
    measure(built, [("c", "the world and " * 100)], [NGRAM], replace(SETTINGS, max_prompt_tokens=40))
    assert {len(request.prompt_token_ids) for request, _ in seen} == {40}


def test_the_histogram_of_tokens_a_step() -> None:
    stats = SpeculationStats()
    for depths, accepted, committed in (([], 0, 1), ([1, 2], 2, 3), ([1, 1], 1, 2), ([1, 2, 3], 3, 3)):
        count_step(stats, depths, accepted, committed)
    assert stats.steps_by_tokens == [1, 1, 2]


# -- estimates -----------------------------------------------------------------------------------------------------


def test_alpha_and_the_formula_on_a_chain() -> None:
    # 10 steps drafted 3 tokens each: 8 first guesses came true, of those 4 seconds, of those 2 thirds; 6 had no draft
    stats = stats_of([10, 10, 10], [8, 4, 2], num_steps=16, num_committed_tokens=30, num_drafts=10)
    chance = alpha(stats)
    assert chance == pytest.approx((8 + 4 + 2) / (10 + 8 + 4))
    assert gamma(stats) == 3.0
    assert formula_length(stats) == pytest.approx((10 * (1 + chance + chance**2 + chance**3) + 6) / 16)
    every = stats_of([2, 2], [2, 2], num_steps=2, num_committed_tokens=6, num_drafts=2)
    assert formula_length(every) == 3.0, "α = 1"
    assert alpha(SpeculationStats("off", 3, 3)) is None and formula_length(SpeculationStats("off", 3, 3)) == 1.0


def test_a_tree_s_width_is_no_depth() -> None:
    stats = stats_of([40, 20], [8, 6], num_steps=10, num_committed_tokens=24, num_drafts=10)
    assert gamma(stats) == 2.0 and alpha(stats) == pytest.approx(14 / (10 + 8))


def test_step_times_run_through_medians() -> None:
    steps = [Step(1, 0, 0, 1, seconds, 0.0, 0.0) for seconds in (1.0, 9.0, 2.0)]
    times = StepTimes([*steps, Step(5, 4, 0, 1, 7.0, 1.0, 0.0)])
    assert [times.seconds(rows) for rows in (1, 3, 5, 7)] == [2.0, 4.0, 6.0, 8.0]
    assert StepTimes([]).seconds(3) == 0.0 and not StepTimes([])
    assert times_of(r2=3.0).seconds(9) == 3.0
    # twice as many slow steps of two rows as quick ones of four: both take what is between
    noisy = StepTimes([Step(rows, 0, 0, 1, each, 0.0, 0.0) for rows, each in ((1, 1.0), (2, 4.0), (2, 4.0), (4, 1.0))])
    assert [noisy.seconds(rows) for rows in (1, 2, 3, 4)] == [1.0, 3.0, 3.0, 3.0]


def test_step_times_follow_the_cost_model_at_the_run_s_scale() -> None:
    times = StepTimes([Step(1, 0, 0, 1, 4.0, 0.0, 0.0), Step(3, 2, 0, 1, 7.0, 1.0, 0.0)], lambda rows: 1 + rows / 3)
    assert [times.seconds(rows) for rows in (1, 3, 6)] == pytest.approx([4.0, 6.0, 9.0])


def test_fixed_lengths_replay_chains() -> None:
    chain = DraftTree.chain([5, 6, 7], "ngram")
    drafts = [Draft(3, chain, (0, 1)), Draft(3, chain, ()), Draft(3, DraftTree(), ()), Draft(3, chain, (0, 1, 2))]
    found = fixed_lengths(drafts, times_of(r1=1.0, r2=1.5), draft_seconds=0.25, chance=0.5)
    assert [each.num_draft_tokens for each in found] == list(range(17))
    assert [each.tokens_per_step for each in found[:4]] == [1.0, 1.5, 2.0, 2.25]
    # only the chain that was accepted to its cap might have gone on, and the empty draft stays empty
    assert found[5].tokens_per_step == pytest.approx(1 + (2 + 0 + 0 + 3 + 0.5 + 0.25) / 4)
    assert [each.beyond for each in found[:6]] == [False] * 4 + [True] * 2
    assert found[0].step_ms == 1000.0
    assert found[1].step_ms == pytest.approx(1e3 * ((3 * 1.5 + 1.0) / 4 + 0.25))
    assert found[5].step_ms == pytest.approx(1e3 * ((2 * 2.5 + 1.0 + 3.5) / 4 + 5 * 0.25))
    assert found[2].tokens_per_second == pytest.approx(2.0 / (found[2].step_ms / 1e3))
    assert best_fixed(found) == max(found, key=lambda each: each.tokens_per_second).num_draft_tokens
    assert fixed_lengths([], times_of(r1=1.0), 0.0, 0.5) == [] and best_fixed([]) is None


def test_fixed_lengths_cut_trees_as_the_engine_does() -> None:
    # a root with two children; the second child's child is the likeliest of depth two
    tree = DraftTree((1, 2, 3, 4), (-1, -1, 0, 1), ("x",) * 4, (0.5, 0.4, 0.1, 0.3))
    found = fixed_lengths([Draft(4, tree, (1, 3))], times_of(r1=1.0), 0.0, 0.9)
    # one node keeps the first child, two both, three the accepted grandchild too; more than it had brings nothing
    assert [each.tokens_per_step for each in found[:7]] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0]


def test_predicted_speedup_charges_rows_and_drafting() -> None:
    steps = (Step(1, 0, 0, 1, 1.0, 0.0, 1.0), Step(4, 3, 2, 3, 3.0, 1.0, 2.0))
    plain = answer(steps=(Step(1, 0, 0, 1, 1.0, 0.0, 1.0),) * 2)
    mine = answer(NGRAM, steps=steps, decode_seconds=4.0, num_decoded=4)
    found = figures_of([mine], {"p": plain}, StepTimes([*plain.steps, *steps]))
    assert found.predicted_speedup == pytest.approx(4 * 1.0 / (1.0 + 2.0 + 1.0))
    assert found.speedup == 1.0 and found.ms_per_token == 1000.0
    assert found.time is not None and (found.time.step_ms, found.time.rest_ms) == (2000.0, 0.0)


def test_intervals_are_seeded_and_hold_the_truth() -> None:
    paces = [Pace(1.0, 10, 2.0, 10), Pace(1.0, 10, 3.0, 10), Pace(1.0, 10, 1.0, 10)]
    assert speedup_of(paces) == pytest.approx(2.0)
    found = interval(paces, speedup_of)
    assert found == interval(paces, speedup_of) and found is not None
    assert 1.0 <= found[0] < 2.0 < found[1] <= 3.0
    assert interval(paces[:1], speedup_of) is None
    assert speedup_of([Pace(0.0, 0, 1.0, 1)]) is None


# -- words ---------------------------------------------------------------------------------------------------------


def figures(**more: Any) -> Figures:
    """A healthy side: 100 answers of 40 tokens in 1,500 steps, twice as fast as plain ones."""
    stats = stats_of([1400, 1300], [1200, 1100], num_steps=1500, num_committed_tokens=3900, num_drafts=1400)
    plain = answer(decode_seconds=2.0, num_decoded=1)
    mine = answer(NGRAM, stats=stats, decode_seconds=1.0, num_decoded=1)
    base: dict[str, Any] = {"num_prompts": 100, "num_tokens": 4000, "num_asked": 1450, "num_unmatched": 50}
    return replace(figures_of([mine], {"p": plain}, StepTimes([])), **{**base, **more})


LOW: dict[str, Any] = {"acceptance_length": 1.2}
RARELY: dict[str, Any] = {"positions": figures().positions[:1], "num_drafts": 9000}
TIME = SimpleNamespace(step_ms=10.0, draft_ms=1.0, verify_ms=8.0, rest_ms=1.0)


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, {}, "A step commits 2.60 tokens (1 without speculation), and tokens come 2.00 times faster"),
        ({"speedup": 0.5}, {}, "tokens come 2.00 times SLOWER"),
        ({"speedup": 1.01}, {}, "a token takes as long as without"),
        ({"speedup": None}, {}, "A step commits 2.60 tokens (1 without speculation)."),
        ({"num_steps": 0}, {}, "No step could have drafted"),
        ({"num_different": 3}, {}, "WRONG: 3 of 100 answers have other ids"),
        ({"num_drafts": 0}, {"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"num_drafts": 0}, {"drafter": "off"}, "Speculation is off"),
        ({"num_drafts": 0, "num_asked": 9, "num_unmatched": 9}, {}, "was asked 9 times and never had a guess"),
        ({"num_drafts": 0, "inactive": {"no room": 1, "too slow": 5}}, {}, "Nothing was drafted: too slow; no room."),
        ({"num_drafts": 0}, {}, "no reason is known"),
        ({**LOW, "num_unmatched": 725}, {}, "No match: in 50 % of the steps in which 'ngram' was asked"),
        ({**LOW, "num_unmatched": 725}, {}, "it had no guess: the last tokens occur nowhere"),
        ({**LOW, "num_unmatched": 725}, {"drafter": "eagle"}, "'eagle' was asked it had no guess."),
        ({**LOW, **RARELY}, {"drafter": "eagle"}, "Only 13 % of the first guesses came true: head mismatch"),
        ({**LOW, **RARELY}, {}, "Only 13 % of the first guesses came true: this text repeats itself little"),
        ({**LOW, **RARELY}, {"drafter": "auto"}, "Only 13 % of the first guesses came true."),
        (LOW, {"temperature": 0.8}, "At temperature 0.8 the target often draws"),
        ({**LOW, "num_drafted_at_stop": 900}, {}, "Stops: 33 % of the draft tokens"),
        ({**LOW, "num_tokens": 500}, {}, "Answers are short, 5.0 tokens on average"),
        ({**LOW, "num_asked": 300}, {}, "In 80 % of the steps the draft budget was zero, because the controller"),
        ({**LOW, "num_asked": 300}, {"num_draft_tokens": 4}, "because tokens, pages or the answer's end left no room"),
        (
            {**LOW, "num_asked": 300, "inactive": {"it is Monday": 2, "'x' proposed nothing": 9, "it raised": 9}},
            {},
            "budget was zero, because it is Monday.",
        ),
        ({**LOW, "num_asked": None, "num_drafts": 300}, {}, "80 % of the steps drafted nothing; from outside"),
        ({"inactive": {"drafter 'x' raised E: y": 2}}, {}, "Drafts were lost in 2 answers: drafter 'x' raised E: y."),
        ({"time": TIME}, {}, "a step takes 1.30 times as long as a plain one, because the target checks 1.8 more rows"),
        ({"time": SimpleNamespace(**{**vars(TIME), "draft_ms": 4.0})}, {}, "and 40 % of it is drafting"),
        ({"num_looping": 7}, {"without_loops": figures(acceptance_length=1.5)}, "without them a step commits 1.50"),
        ({"num_looping": 100}, {}, "no other is left to judge by"),
    ],
)  # fmt: skip
def test_each_cause_has_its_words(changes: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    told = verdict(figures(**changes), **{"drafter": "ngram", **arguments})
    assert sum(said in sentence for sentence in told) == 1, told


def test_a_healthy_side_has_no_cause_to_name() -> None:
    assert len(verdict(figures(), "ngram")) == 1
    assert len(verdict(figures(**LOW), "ngram")) == 1, "low, but nothing that the figures show is to blame"


def test_the_best_fixed_length_is_advised() -> None:
    drafts = [Draft(4, DraftTree.chain([5, 6, 7, 8], "ngram"), (0, 1))]
    flat, steep = (
        fixed_lengths(drafts, times, 0.0, 0.5) for times in (times_of(r1=1.0, r9=1.01), times_of(r1=1.0, r2=9.0))
    )

    def advice(found: Any, **more: Any) -> str:
        return verdict(figures(fixed=tuple(found), best_fixed=best_fixed(found)), "ngram", **more)[-1]

    assert "best fixed draft length is 2: 2.99 times the tokens a second" in advice(flat)
    assert advice(flat, num_draft_tokens=2).endswith("and it is the one that you chose.")
    assert "no fixed draft length pays" in advice(steep)
    every = fixed_lengths([drafts[0]._replace(path=(0, 1, 2, 3))], times_of(r1=1.0), 0.0, 0.9)
    assert "is 16, which is more than this run ever asked for" in advice(every)


# -- showing -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(built: Built) -> dict[str, Any]:
    prompts = [*PROMPTS, ("copy", "and " * 30)]
    found = measure(built, prompts, [NGRAM, COLD], replace(SETTINGS, max_tokens=64))
    return {**ABOUT, **result_of(found, 0.0, 4)}


def test_the_page_has_every_figure(result: dict[str, Any]) -> None:
    shown = page(result)
    cells = set(re.findall(r"<t[dh][^>]*>([^<]*)</t", shown))
    for label, side in result["sides"].items():
        for found in (side["overall"], *side["categories"].values()):
            names = ("acceptance_length", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens")
            names += ("ms_per_token", "speedup", "predicted_speedup", "predicted_length", "best_fixed")
            for value in (*(found[name] for name in names), *found["time"].values()):
                assert cell(value) in cells, value
            if found["acceptance_rate"] is not None:
                assert f"{100 * found['acceptance_rate']:.1f} %" in cells
            for each in found["positions"]:
                assert f"{each['accepted']}/{each['drafted']} {100 * each['rate']:.0f} %" in cells
            for count in found["steps_by_tokens"]:
                assert cell(count) in cells
            for each in found["fixed"][:7]:
                assert cell(round(each["tokens_per_second"], 1)) in cells
            for sentence in found["verdict"]:
                assert label == "off" or sentence.replace("'", "&#x27;") in shown
    assert "environment: &lt;test&gt;" in shown and "<test>" not in shown


def test_the_page_s_plots_are_drawn(result: dict[str, Any]) -> None:
    plots = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page(result), re.DOTALL)]
    assert len(plots) == 4
    lengths, positions = plots[0], plots[1]
    assert len(lengths.findall("./rect/title")) == 4, "two drafters in two categories"
    told = result["sides"]["ngram"]["categories"]["copy"]["acceptance_length"]
    assert any(title.text == f"ngram: {told:.3g}" for title in lengths.findall("./rect/title"))
    depth = len(result["sides"]["ngram"]["overall"]["positions"])
    assert len(positions.findall("./circle")) == 2 * depth and len(positions.findall("./polyline")) == 2
    for plot in plots:
        for shape in plot.findall("./rect"):
            assert float(shape.get("height", "0")) >= 0 and 0 <= float(shape.get("x", "0")) <= 640
    assert "http" not in re.sub(r"<title>.*?</title>", "", page(result)), "nothing is fetched"


def test_a_page_of_a_side_that_drafted_nothing(built: Built) -> None:
    found = measure(built, PROMPTS[:1], [NGRAM], replace(SETTINGS, num_draft_tokens=0))
    result = {**ABOUT, **result_of(found, 0.0, 0)}
    assert result["acceptance_length"] == 1.0 and result["acceptance_rate"] is None
    assert "Nothing was drafted: num_draft_tokens is 0." in page(result)
    assert "Nothing was drafted: num_draft_tokens is 0." in text(result)


def test_loops_are_reported_apart() -> None:
    looping, straight = (7,) * 60, tuple(range(60))
    mine = [
        answer(
            NGRAM,
            prompt=name,
            token_ids=ids,
            stats=stats_of([10], [hits], num_steps=10, num_committed_tokens=10 + hits, num_drafts=10),
        )
        for name, ids, hits in (("a", looping, 10), ("b", straight, 5))
    ]
    plain = [answer(prompt=each.prompt, token_ids=each.token_ids) for each in mine]
    result = result_of([*plain, *mine], 0.0, None)
    side = result["sides"]["ngram"]
    assert (side["overall"]["acceptance_length"], side["overall"]["without_loops"]["acceptance_length"]) == (1.75, 1.5)
    assert side["overall"]["num_looping"] == 1 and [a["loops"] for a in result["answers"]] == [True, False] * 2
    (shown,) = [each for each in tables(result, detail=False) if "loop" in each.title]
    assert shown.rows[0][:5] == ["ngram", "overall", 1, 1.75, 1.5]
    assert result_of([plain[1], mine[1]], 0.0, None)["sides"]["ngram"]["overall"]["without_loops"] is None


# -- comparing -----------------------------------------------------------------------------------------------------


def _result(length: float, ms: float, label: str = "ngram", prompts: int = 20) -> dict[str, Any]:
    answers = [
        {
            "prompt": f"p{i}", "category": "ab"[i % 2], "side": label, "num_steps": 10,
            "num_committed_tokens": 10 * length + (i % 3 - 1), "decode_ms": ms * 10, "num_decoded": 10,
        }
        for i in range(prompts)
    ]  # fmt: skip
    return {"acceptance_length": length, "sides": {"off": {}, label: {}}, "answers": answers}


def test_two_results_are_compared_over_common_prompts() -> None:
    rows = compared(_result(2.0, 5.0, prompts=24), _result(2.5, 4.0, prompts=18))
    assert [(row["category"], row["num_prompts"]) for row in rows] == [("overall", 18), ("a", 9), ("b", 9)]
    length, pace = rows[0]["acceptance_length"], rows[0]["ms_per_token"]
    assert (length["first"], length["second"]) == (2.0, 2.5)
    assert length["difference"] == pytest.approx(0.5) and length["interval"] == pytest.approx((0.5, 0.5))
    assert (pace["first"], pace["second"], pace["difference"]) == (5.0, 4.0, -1.0)
    assert rows == compared(_result(2.0, 5.0, prompts=24), _result(2.5, 4.0, prompts=18)), "seeded"
    shown = table_of(rows)
    assert shown.rows[0][:5] == ["overall", "ngram", 18, 2.0, 2.5]


def test_an_interval_of_a_difference_covers_its_spread() -> None:
    first, second = _result(2.0, 5.0), _result(2.0, 5.0)
    for i, each in enumerate(second["answers"]):
        each["num_committed_tokens"] += 10 if i < 10 else -10
    found = compared(first, second)[0]["acceptance_length"]
    assert found["difference"] == pytest.approx(0.0)
    low, high = found["interval"]
    assert -0.7 < low < -0.1 and 0.1 < high < 0.7


def test_what_cannot_be_compared() -> None:
    (told,) = {row["drafter"] for row in compared(_result(2.0, 5.0), _result(2.5, 4.0, label="suffix"))}
    assert told == "ngram → suffix", "each has one drafter"
    other = _result(2.0, 5.0, label="suffix")
    other["sides"]["eagle"] = {}
    with pytest.raises(ConfigError, match="no drafter is in both results: ngram in A; suffix, eagle in B"):
        compared(_result(2.0, 5.0), other)
    with pytest.raises(ConfigError, match="no prompt in common"):
        compared(_result(2.0, 5.0), {**_result(2.0, 5.0), "answers": []})


# -- the command ---------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["acceptance", *arguments])


def measured(folder: str, dataset: Path, *more: str) -> Result:
    model = ("--model", folder, "--kv-cache-gib", "0.01", "--drafter", "ngram", "--dataset", str(dataset))
    return run(*model, "--max-tokens", "16", *more)


def test_the_command_writes_everything(folder: str, dataset: Path, tmp_path: Path) -> None:
    files = tmp_path / "a.json", tmp_path / "a.html"
    result = measured(folder, dataset, "--json", str(files[0]), "--html", str(files[1]), "--cold")
    assert result.exit_code == 0, result.output
    for words in ("By category", "Steps by the tokens", "Accepted/drafted", "best fixed", "A step commits"):
        assert words in result.stdout
    found = json.loads(files[0].read_text())
    assert found["acceptance_length"] == found["sides"]["ngram"]["overall"]["acceptance_length"] >= 1.0
    assert (found["model"], found["max_tokens"], found["temperature"], found["num_different"]) == (folder, 16, 0.0, 0)
    assert len(found["answers"]) == 9 and found["provenance"]["seed"] == 0
    assert files[1].read_text().startswith("<!doctype html>")
    again = run("--compare", str(files[0]), str(files[0]))
    assert again.exit_code == 0 and "B against A" in again.stdout and "overall" in again.stdout


def test_json_on_stdout_is_alone(folder: str, dataset: Path) -> None:
    result = measured(folder, dataset, "--json", "-", "--limit", "2", "--temperature", "0.9", "--num-draft-tokens", "3")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"acceptance_length", "acceptance_rate", "drafter", "sides", "answers", "provenance"} <= set(found)
    assert found["sides"]["ngram"]["overall"]["num_prompts"] == 2 and found["num_draft_tokens"] == 3


def test_other_ids_are_a_loud_failure(folder: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit_the_draft(self: Any, span: Any, result: Any, drawn: Any) -> tuple[int, ...]:
        if not len(span.tree):
            return ()
        drawn.ids[0] = span.tree.token_ids[0]
        return (0,)

    monkeypatch.setattr(engine_module.Engine, "_accepted", commit_the_draft)
    result = measured(folder, dataset, "--json", "-", "--temperature", "1", "--num-draft-tokens", "4")
    assert result.exit_code == 1
    assert "WRONG: " in result.stderr and json.loads(result.stdout)["num_different"] > 0


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--drafter", "off"], ConfigError, "always asked"),
        (["--drafter", "ngrim"], ConfigError, "Did you mean 'ngram'"),
        (["--server", "127.0.0.1:1", "--dataset", "D", "--cold"], ConfigError, "--cold needs an engine"),
        (["--server", "127.0.0.1:1", "--html", "x"], ConfigError, "--html needs answers"),
        (["--server", "127.0.0.1:1", "--seconds", "0.1"], EngineFault, "127.0.0.1:1"),
        (["--compare", "none.json", "none.json"], ConfigError, "cannot be read"),
        (["--compare", "D", "D"], ConfigError, "cannot be read"),
        (["--dataset", "none.jsonl", "--model", "M"], ConfigError, "none.jsonl cannot be read"),
    ],
)  # fmt: skip
def test_the_command_refuses(
    arguments: list[str], error: type[Exception], said: str, folder: str, dataset: Path
) -> None:
    names = {"D": str(dataset), "M": folder}
    result = run(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code != 0 and isinstance(result.exception, error)
    assert said in str(result.exception)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"sides": {}}')
    result = run("--compare", str(path), str(path))
    assert isinstance(result.exception, ConfigError) and "is no result" in result.exception.message


# -- a server ------------------------------------------------------------------------------------------------------


def over_server(load: Callable[[], Any], body: Callable[[str], Any]) -> Any:
    """`body(address)` on a thread beside a server."""

    async def go() -> Any:
        async with serving(load) as client:
            return await asyncio.to_thread(body, f"127.0.0.1:{client.port}")

    return asyncio.run(go())


def test_counters_are_compared() -> None:
    first = pb.SpeculationStats(
        num_steps=10, num_drafts=4, num_draft_tokens=8, num_accepted_tokens=2, accepted_per_position=[2],
        drafted_per_position=[4, 4], num_committed_tokens=12, steps_by_tokens=[8, 2],
    )  # fmt: skip
    later = pb.SpeculationStats(
        num_steps=30, num_drafts=14, num_draft_tokens=38, num_accepted_tokens=17, accepted_per_position=[9, 5, 3],
        drafted_per_position=[14, 14, 10], num_committed_tokens=47, steps_by_tokens=[20, 5, 2, 3],
    )  # fmt: skip
    before, after = pb.GetStatsResponse(speculation=first), pb.GetStatsResponse(speculation=later)
    for totals, seconds, forwards, tokens in ((before, 1, 11, 20), (after, 5, 31, 70)):
        totals.step_time.FromSeconds(2 * seconds)
        totals.draft_time.FromMilliseconds(100 * seconds)
        totals.verify_time.FromSeconds(seconds)
        totals.num_forwards, totals.num_output_tokens = forwards, tokens
    found = counted(before, after, 10.0)
    assert found["acceptance_length"] == 35 / 20 and found["acceptance_rate"] == 0.5
    assert (found["num_steps"], found["num_drafts"], found["num_forwards"]) == (20, 10, 20)
    assert [(p["drafted"], p["accepted"]) for p in found["positions"]] == [(10, 7), (10, 5), (10, 3)]
    assert found["steps_by_tokens"] == [12, 3, 2, 3] and found["tokens_per_second"] == 5.0
    assert found["time"] == pytest.approx({"step_ms": 400, "draft_ms": 20, "verify_ms": 200, "rest_ms": 180})


def test_a_server_is_watched(tmp_path: Path) -> None:
    loaded = Loaded()
    loaded.engine.metrics.speculation = stats_of([9], [3], num_steps=9, num_committed_tokens=12, num_drafts=9)
    path = tmp_path / "w.json"
    watched = over_server(
        lambda: loaded, lambda address: run("--server", address, "--seconds", "0.2", "--json", str(path))
    )
    assert watched.exit_code == 0, watched.output
    assert "From outside one cannot tell:" in watched.stdout and "--dataset" in watched.stdout
    found = json.loads(path.read_text())
    assert (found["acceptance_length"], found["num_steps"], found["time"]) == (1.0, 0, None), "nobody was served"
    assert found["model"] == "fake" and found["unknown"]


def test_a_server_is_asked(built: Built, dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    arguments = ("--drafter", "ngram", "--dataset", str(dataset), "--max-tokens", "16", "--num-draft-tokens", "3")
    asked = over_server(lambda: built, lambda address: run("--server", address, *arguments, "--json", str(path)))
    assert asked.exit_code == 0, asked.output
    found = json.loads(path.read_text())
    overall = found["sides"]["ngram"]["overall"]
    mine = measure(built, chosen(PROMPTS, None, 0), [NGRAM], Settings(max_tokens=16, num_draft_tokens=3))
    local = result_of(mine, 0.0, 3)["sides"]["ngram"]["overall"]
    for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "acceptance_length", "predicted_length"):
        assert overall[name] == local[name]
    assert overall["steps_by_tokens"] == list(local["steps_by_tokens"])
    assert (found["num_different"], found["failed"], overall["time"], overall["fixed"]) == (0, {}, None, [])
    assert found["unknown"] and found["unknown"][0] in asked.stdout and overall["num_asked"] is None


def test_a_prompt_that_a_server_refuses_is_left_out(built: Built, tmp_path: Path) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "s.json"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("the world", "the world " * 400)))
    arguments = ("--drafter", "ngram", "--dataset", str(path), "--max-tokens", "4", "--json", str(out))
    asked = over_server(lambda: built, lambda address: run("--server", address, *arguments))
    assert asked.exit_code == 0, asked.output
    assert "is left out: " in asked.stderr
    found = json.loads(out.read_text())
    assert len(found["failed"]) == 1 and found["sides"]["ngram"]["overall"]["num_prompts"] == 1


def test_the_server_tells_where_time_went(built: Built) -> None:
    async def body(client: Client) -> None:
        before = await client.model.GetStats(pb.GetStatsRequest())
        await client.generate(pb.GenerateRequest(text="the world the world", stopping=pb.StoppingParams(max_tokens=8)))
        after = await client.model.GetStats(pb.GetStatsRequest())
        step, draft, verify = (
            getattr(after, name).ToNanoseconds() - getattr(before, name).ToNanoseconds()
            for name in ("step_time", "draft_time", "verify_time")
        )
        assert step >= draft + verify and verify > 0 and draft > 0
        grown = sum(after.speculation.steps_by_tokens) - sum(before.speculation.steps_by_tokens)
        assert grown == after.speculation.num_steps - before.speculation.num_steps > 0

    async def go() -> None:
        async with serving(lambda: built) as client:
            await body(client)

    asyncio.run(go())


@pytest.fixture(autouse=True)
def _quiet(built: Built) -> Iterator[None]:
    """No test leaves work behind in the engine that all share."""
    yield
    assert not built.engine.has_work()
