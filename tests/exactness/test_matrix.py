"""Speculation never changes a token: every drafter × greedy or sampled × situation × format, id for id.

The cells are generated. The reference of a request is the request alone, without drafts, in a roomy engine
without prefix cache; a cell must give the same ids in its situation with speculation off and on, and must prove
that what its name claims happened (a preemption, a page hit, a rejected draft…). A subset in which every pair of
factor values meets runs by default, the rest under `make exactness`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
from cells import (
    DRAFTERS,
    MODES,
    SITUATIONS,
    TARGET,
    all_pairs,
    cell_params,
    check_drafts,
    make_drafter,
    pairwise,
    prompt,
    request,
    vocab_of,
)
from drafters import RandomTreeDrafter
from harness import EngineHarness, Run

from specserve.request import Request

FORMATS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


class Cell(NamedTuple):
    drafter: str
    mode: str
    situation: str
    format: str


ALL_CELLS = [Cell(*values) for values in itertools.product(DRAFTERS, MODES, SITUATIONS, FORMATS)]
DEFAULT_CELLS = pairwise(ALL_CELLS)


class References:
    """Runs without drafts, each made once: every request alone, and every situation as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._alone: dict[tuple[str, str], Run] = {}
        self._situations: dict[tuple[str, str, str], Run] = {}

    def alone(self, item: Request, format: str) -> Run:
        key = (format, repr(item))
        if key not in self._alone:
            harness = EngineHarness(self.folder, **FORMATS[format], enable_prefix_caching=False)
            self._alone[key] = harness.run([item])
        return self._alone[key]

    def situation(self, name: str, mode: str, format: str) -> Run:
        """Speculation off in the situation; equal to each request alone."""
        if (name, mode, format) not in self._situations:
            situation = SITUATIONS[name]
            requests = situation.requests(mode)
            harness = EngineHarness(self.folder, **FORMATS[format], **situation.options)
            run = harness.run(requests, situation.arrivals)
            situation.claim(harness, run, {item.request_id: item for item in requests})
            for item in requests:
                for key, ids in self.alone(item, format).answers.items():
                    assert run.answers[key] == ids, f"off: {key} in situation {name} is not what it is alone"
            self._situations[name, mode, format] = run
        return self._situations[name, mode, format]


@pytest.fixture(scope="module")
def references(sharp_llama: Path) -> References:
    return References(sharp_llama)


@pytest.mark.parametrize("cell", cell_params(ALL_CELLS, DEFAULT_CELLS))
def test_on_equals_off(cell: Cell, references: References) -> None:
    situation = SITUATIONS[cell.situation]
    requests = situation.requests(cell.mode)
    off = references.situation(cell.situation, cell.mode, cell.format)
    vocab_size = vocab_of(references.folder)
    drafter = make_drafter(cell.drafter, off.full(requests), vocab_size)
    harness = EngineHarness(references.folder, drafter, **FORMATS[cell.format], **situation.options)
    on = harness.run(requests, situation.arrivals)
    assert on.answers == off.answers
    assert on.texts == off.texts
    assert {key: end.reason for key, end in on.finished.items()} == {
        key: end.reason for key, end in off.finished.items()
    }
    situation.claim(harness, on, {item.request_id: item for item in requests})
    check_drafts(cell.drafter, drafter, on)
    if cell.situation == "n3":
        check_choices(cell, on, references)


def check_choices(cell: Cell, run: Run, references: References) -> None:
    """Choice 0 is what n = 1 gives; sampled choices differ from each other."""
    single = references.alone(request(TARGET, cell.mode, prompt(1, 21), max_tokens=60), cell.format)
    answers = [run.answers[f"{TARGET}/{choice}"] for choice in range(3)]
    assert answers[0] == single.answers[f"{TARGET}/0"]
    num_different = len({tuple(answer) for answer in answers})
    assert num_different == (1 if cell.mode == "greedy" else 3)


def test_the_default_cells_cover_every_pair() -> None:
    assert all_pairs(DEFAULT_CELLS) == all_pairs(ALL_CELLS)
    assert len(ALL_CELLS) == 5 * 2 * 6 * 3
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
