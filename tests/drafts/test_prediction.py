"""The prediction drafter: it follows, loses and finds again where an answer is in what was expected of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cells import prompt, request
from driving import Step, drive, row
from harness import EngineHarness, Run, sharpen
from hypothesis import given
from hypothesis import strategies as st
from specserve_drafts import make_drafter
from specserve_drafts.prediction import PredictionDrafter
from tiny import TinyLlama

from specserve.config import ModelLimits, SpeculationConfig
from specserve.errors import InvalidRequest
from specserve.proposal import DraftTree
from specserve.request import SamplingParams, SpeculationParams
from specserve.validation import validate

PROMPT = [900, 901]
EXPECTED = list(range(100, 160))  # no token twice


def steps_of(answer: Sequence[int], expected: Sequence[int] = EXPECTED, cap: int = 8) -> list[Step]:
    return drive(PredictionDrafter(), PROMPT, answer, cap=cap, prediction=tuple(expected))


def test_an_answer_as_predicted_takes_full_steps() -> None:
    steps = steps_of(EXPECTED)
    assert [len(step.path) for step in steps] == [8, 8, 8, 8, 8, 8, 5]
    assert steps[0].tree == DraftTree.chain(EXPECTED[1:9], "prediction", steps[0].tree.survival)


def test_nothing_is_drafted_without_a_prediction_or_past_its_end() -> None:
    assert all(step.tree == DraftTree() for step in steps_of(EXPECTED, expected=()))
    after = [step for step in steps_of([*EXPECTED, *range(300, 320)]) if step.at >= len(EXPECTED) + 8]
    assert after and all(step.tree == DraftTree() for step in after)


OTHER = [800, 801, 802]


@pytest.mark.parametrize(
    ("answer", "case"),
    [
        ([*EXPECTED[:30], *OTHER, *EXPECTED[33:]], "as many replaced"),
        ([*EXPECTED[:30], *OTHER, *EXPECTED[30:]], "put in"),
        ([*EXPECTED[:30], *OTHER, *EXPECTED[36:]], "more replaced than put in"),
        ([*EXPECTED[:30], *EXPECTED[37:]], "left out"),
        ([*EXPECTED[40:], *EXPECTED[:40]], "in another order"),
        ([*OTHER, *EXPECTED], "a preamble"),
    ],
)
def test_it_goes_on_after_a_difference(answer: list[int], case: str) -> None:
    steps = steps_of(answer)
    # each token that was not expected costs a step; so does each place where the answer leaves the prediction
    assert len(steps) <= len(answer) / 9 + len(OTHER) + 4
    assert len(steps[-2].path) == 8


def test_of_equal_lines_the_nearest_is_taken() -> None:
    line = [200, 201, 202, 203, 204, 205]
    expected = [token for i in range(40) for token in (*line, 300 + i)]
    answer = [*expected[:17], 800, 801, *expected[19:60]]
    steps = [step for step in steps_of(answer, expected) if step.at > 30]
    assert all(len(step.path) == 8 for step in steps[:-1])


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), max_size=40),
    st.integers(1, 20),
)
def test_any_prediction_gives_trees_that_can_be_verified(answer: list[int], expected: list[int], cap: int) -> None:
    for step in steps_of([7, *answer], expected, cap):
        assert len(step.tree.survival) == len(step.tree)


def test_survival_is_what_survives() -> None:
    rng, drafter, nodes = random.Random(5), PredictionDrafter(), []
    for name in range(60):
        expected = [rng.randrange(100, 500) for _ in range(150)]
        answer = [token if rng.random() < 0.85 else rng.randrange(100) for token in expected]
        steps = drive(drafter, PROMPT, answer, cap=12, name=str(name), prediction=tuple(expected))
        if name >= 20:
            nodes += [(value, i in step.path) for step in steps for i, value in enumerate(step.tree.survival)]
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = [(value, hit) for value, hit in nodes if low <= value < low + 0.25]
        assert len(inside) >= 300
        mean = sum(value for value, _ in inside) / len(inside)
        assert abs(mean - sum(hit for _, hit in inside) / len(inside)) < 0.1, f"from {low} on"


def test_a_sequence_leaves_nothing_behind() -> None:
    drafter = PredictionDrafter()
    drive(drafter, PROMPT, EXPECTED, prediction=tuple(EXPECTED))
    drafter.stop(row([1, 2], 1, name="never seen"))
    assert drafter._alignments == {} and drafter._drafts == {}


# ---- at the gate and in the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["text", (1, "2"), (1, True), (1.0,)])
def test_what_is_no_ids_is_refused(prediction: tuple[int, ...]) -> None:
    limits = ModelLimits(
        vocab_size=1000, max_model_len=64, pool_tokens=640, page_size=16, max_num_seqs=4, eos_token_ids=(2,)
    )
    asked = replace(request("r", "greedy", (1, 2)), speculation=SpeculationParams(prediction=prediction))
    with pytest.raises(InvalidRequest, match=r"speculation\.prediction: must be token ids, which are integers"):
        validate(asked, limits)


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64), tmp_path_factory.mktemp("prediction") / "llama")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_changes_and_a_good_prediction_saves_steps(folder: Path, temperature: float) -> None:
    asked = request("r", "greedy", prompt(1, 30), max_tokens=60)
    asked = replace(asked, params=SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True))
    answer = EngineHarness(folder).run([asked]).answers["r/0"]

    def with_prediction(ids: Sequence[int]) -> Run:
        drafter = make_drafter("prediction", SpeculationConfig(), None)
        harness = EngineHarness(folder, drafter, num_draft_tokens=8)
        run = harness.run([replace(asked, speculation=SpeculationParams(prediction=tuple(ids)))])
        assert run.answers["r/0"] == answer
        return run

    edited = [*answer[:20], 9, 9, 9, *answer[22:40], *answer[44:]]
    wrong = [5, 3] * 20
    num_steps = [with_prediction(ids).finished["r/0"].speculation.num_steps for ids in (answer, edited, wrong, ())]
    assert num_steps[0] == 7 and num_steps[3] == 59
    assert num_steps[0] < num_steps[1] < 30 < num_steps[2]
