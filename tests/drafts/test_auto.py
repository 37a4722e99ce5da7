"""Auto: its parts make one tree, each learns from it, and the trouble of one part stays its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import MODES, SITUATIONS, prompt, request
from drafters import CountingDrafter
from driving import VOCAB, drive, row
from harness import EngineHarness, Run, sharpen
from specserve_drafts import make_auto
from specserve_drafts.auto import AutoDrafter
from specserve_drafts.prediction import PredictionDrafter
from specserve_drafts.recycling import RecyclingDrafter
from specserve_drafts.suffix import SuffixDrafter
from tiny import TinyLlama

from specserve.build import make_drafters
from specserve.config import SpeculationConfig
from specserve.errors import ConfigError
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import SpeculationParams


class Fixed(CountingDrafter):
    """Says the same for every root; remembers what it was told."""

    def __init__(self, name: str, *token_ids: int, survival: float = 0.5) -> None:
        super().__init__()
        self.name = name
        self.tree = DraftTree.chain(token_ids, name, [survival ** (i + 1) for i in range(len(token_ids))])
        self.seen: list[StepResult] = []
        self.failing: dict[str, set[str]] = {}  # of which sequences, by method
        self.asked: list[list[str]] = []

    def fail(self, method: str, sequence_id: str) -> None:
        if sequence_id in self.failing.get(method, ()):
            raise RuntimeError(f"{method} of {sequence_id}")

    def start(self, view: DraftRow) -> None:
        super().start(view)
        self.fail("start", view.sequence_id)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        self.asked.append([each.sequence_id for each in rows])
        for each in rows:
            self.fail("propose", each.sequence_id)
        return [self.tree] * len(rows)

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self.seen.append(result)
        self.fail("observe", view.sequence_id)


A, B, C = (row([1, 2, 3], 2, name=name) for name in "abc")
BOTH = {(7,), (7, 8), (9,)}


def pair() -> tuple[Fixed, Fixed, AutoDrafter]:
    first, second = Fixed("first", 7, 8), Fixed("second", 9)
    return first, second, AutoDrafter([first, second], VOCAB)


def paths(auto: AutoDrafter, *rows: DraftRow) -> list[set[tuple[int, ...]]]:
    return [set(tree.paths()) for tree in auto.propose(rows, [10] * len(rows))]


# ---- one tree -------------------------------------------------------------------------------------------------------


def test_parts_make_one_tree_and_all_learn_from_it() -> None:
    first, second, auto = pair()
    auto.start(A)
    [tree] = auto.propose([A], [10])
    assert set(tree.paths()) == BOTH and set(tree.drafters) == {"first", "second"}
    result = StepResult(tree, (0,), (7, 4), [7, 4, -1, -1])
    auto.observe(A, result)
    auto.stop(A)
    assert first.seen == second.seen == [result]
    assert (first.num_starts, first.num_stops) == (second.num_starts, second.num_stops) == (1, 1)


def test_recycling_grows_below_the_others_nodes() -> None:
    recycling = RecyclingDrafter()
    auto = AutoDrafter([Fixed("first", 7, 8, survival=0.9), recycling], VOCAB)
    assert auto.wants_top_ids
    auto.start(A)
    told = StepResult(DraftTree.chain((7,), "first", (0.9,)), (), (5,), [5, -1], [[4, 6], [8, 11]])
    auto.observe(row([1, 2, 3, 5], 2, name="a"), told)
    [tree] = auto.propose([A], [10])
    assert set(tree.paths()) == {(7,), (7, 8), (7, 11), (4,), (6,)}
    assert dict(zip(tree.paths(), tree.drafters, strict=True))[7, 11] == "recycling"


def test_more_drafters_accept_more() -> None:
    """A text that partly repeats: what each part alone leaves to be guessed, the others find."""
    text = [11 + i * i % 23 for i in range(150)]
    text[60:90] = range(200, 230)
    answer = text[10:]
    makers: list[Callable[[], list[Drafter]]] = [
        lambda: [SuffixDrafter()],
        lambda: [PredictionDrafter()],
        lambda: [PredictionDrafter(), SuffixDrafter()],
    ]
    expected = [*answer[:20], *answer[50:90]]
    steps = [len(drive(AutoDrafter(make(), VOCAB), text[:10], answer, prediction=expected)) for make in makers]
    assert steps[2] < min(steps[:2])


# ---- trouble of one part --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["start", "propose", "observe"])
def test_a_part_that_fails_for_a_sequence_is_muted_for_it_alone(method: str) -> None:
    first, _, auto = pair()
    first.failing[method] = {"b"}
    for each in (A, B, C):
        auto.start(each)
    whole = BOTH if method == "observe" else {(9,)}
    assert paths(auto, A, B, C) == [BOTH, whole, BOTH]
    for each in (A, B, C):
        auto.observe(each, StepResult(DraftTree(), (), (5,), [5]))
    first.failing, first.asked = {}, []
    assert paths(auto, A, B, C) == [BOTH, {(9,)}, BOTH] and first.asked == [["a", "c"]]
    assert auto.num_faults == 1
    auto.stop(B)
    auto.start(B)
    assert paths(auto, B) == [BOTH], "another sequence of the same name starts anew"


def test_a_part_that_cannot_stop_or_count_stops_nobody() -> None:
    first, second, auto = pair()
    first.stop = second.stop = lambda view: 1 / 0  # type: ignore[assignment, method-assign]
    auto.start(A)
    auto.stop(A)
    first.propose = lambda rows, caps: [first.tree] * 2  # type: ignore[method-assign]
    auto.start(B)
    assert paths(auto, B) == [{(9,)}]
    first.propose = None  # type: ignore[assignment, method-assign]
    assert paths(auto, C) == [{(9,)}]


@pytest.mark.parametrize(
    "bad",
    [
        DraftTree((VOCAB,), (-1,), ("x",), (0.5,)),
        DraftTree((5,), (0,), ("x",), (0.5,)),
        DraftTree((5,), (-1,), ("x",), (float("nan"),)),
        DraftTree((5,), (-1,), ("x",)),
        DraftTree((5, 5), (-1, -1), ("x", "x"), (0.5, 0.5)),
        DraftTree((5.0,), (-1,), ("x",), (0.5,)),  # type: ignore[arg-type]
        (5,),
        None,
    ],
)
def test_a_tree_that_cannot_be_used_costs_that_tree(bad: Any) -> None:
    first, _, auto = pair()
    good, first.tree = first.tree, bad
    auto.start(A)
    assert paths(auto, A) == [{(9,)}] and auto.num_faults == 1
    first.tree = good
    assert paths(auto, A) == [BOTH], "it may do better next time"


def test_a_broken_recycling_costs_its_branches() -> None:
    recycling = RecyclingDrafter()
    auto = AutoDrafter([Fixed("first", 7), recycling], VOCAB)
    auto.start(A)
    auto.observe(row([1, 2, 3, 5], 2, name="a"), StepResult(DraftTree(), (), (5,), [5], [[4]]))
    assert paths(auto, A) == [{(7,), (4,)}]
    recycling.read_prompts = lambda rows: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    assert paths(auto, A) == [{(7,)}] and auto.num_faults == 1


# ---- what an engine offers ------------------------------------------------------------------------------------------


def test_the_model_free_ones_are_offered_without_a_target() -> None:
    offered = make_drafters(SpeculationConfig(), None)
    assert set(offered) == {"ngram", "suffix", "recycling", "prediction", "auto"}
    auto: Any = offered["auto"]
    assert [part.name for part in auto.parts] == ["prediction", "suffix", "recycling"]
    assert all(part is offered[part.name] for part in auto.parts), "what one learns, the other knows"
    assert make_auto({}, None, lambda: 0.0).propose([A], [5]) == [DraftTree()]


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("auto") / "llama")


def test_model_drafters_are_offered_when_they_are_configured(folder: Path) -> None:
    def offered(drafter: str, **options: Any) -> set[str]:
        harness = EngineHarness(folder, drafter, **options)
        assert set(harness.engine.limits.drafters) == {"off", *harness.engine.drafting.drafters}
        return set(harness.engine.drafting.drafters) - {"ngram", "suffix", "recycling", "prediction", "auto"}

    assert offered("off") == offered("auto") == set()
    assert offered("early_exit") == offered("ngram", early_exit_layers=1) == {"early_exit"}
    assert offered("auto", draft_model=str(folder)) == {"draft_model"}
    with pytest.raises(ConfigError, match="no EAGLE head comes with specserve for this model"):
        offered("eagle")


# ---- in the engine --------------------------------------------------------------------------------------------------


def accepted(harness: EngineHarness, run: Run) -> int:
    auto: Any = harness.engine.drafting.drafters["auto"]
    assert auto.num_faults == harness.engine.metrics.num_drafter_faults == 0
    return sum(end.speculation.num_accepted_tokens for end in run.finished.values())


@pytest.mark.parametrize("num_nodes", [9, 64])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_on_equals_off(folder: Path, situation: str, mode: str, num_nodes: int) -> None:
    made = SITUATIONS[situation]
    requests = made.requests(mode)
    options = {"num_draft_tokens": num_nodes, **made.options}
    off = EngineHarness(folder, **options).run(requests, made.arrivals)
    harness = EngineHarness(folder, "auto", **options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    made.claim(harness, on, {item.request_id: item for item in requests})
    assert accepted(harness, on) > 0


@pytest.mark.parametrize("mode", MODES)
def test_it_accepts_what_its_parts_would_and_a_prediction_besides(folder: Path, mode: str) -> None:
    asked = [request(f"r{i}", mode, prompt(i, 25), seed=i, max_tokens=80) for i in range(3)]
    answers = EngineHarness(folder).run(asked).answers
    expected = [
        replace(each, speculation=SpeculationParams(prediction=tuple(answers[f"{each.request_id}/0"])))
        for each in asked
    ]

    def steps(drafter: str, requests: Sequence[Any]) -> int:
        run = EngineHarness(folder, drafter, num_draft_tokens=15).run(requests)
        assert run.answers == answers
        return sum(end.speculation.num_steps for end in run.finished.values())

    alone = min(steps("suffix", asked), steps("recycling", asked))
    assert steps("auto", expected) < steps("auto", asked) <= alone * 1.1
