"""On = off for every drafter of the product: drafter × mode × situation × format × nodes × what is asked.

`test_matrix.py` has drafters that know the answers and so force every verdict; here the real ones guess, with
their own state, their own layers in the pool, and up to 64 nodes a step. A cell also proves that the situation came
about, that drafts were verified, and that no draft was lost to a fault.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cells import MODES, SITUATIONS, all_pairs, cell_params, pairwise
from eagle_files import head_config, head_tensors, write_head
from harness import EngineHarness, Run
from safetensors.torch import load_file, save_file

from specserve.models.decoder import DecoderConfig
from specserve.request import Request

FORMATS = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}
NODES = {"few": 5, "many": 64}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "processed": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {9: 1.0, 30: -1.0},
        "top_p": 0.95,
        "min_p": 0.01,
    },
}
DRAFTERS = ("ngram", "suffix", "recycling", "prediction", "early_exit", "draft_model", "eagle", "auto", "auto_head")
# these look at tokens that come again, which the situations' prompts and answers do; a random head is never right
EXPECTED_RIGHT = {"ngram", "suffix", "prediction", "early_exit", "draft_model", "auto", "auto_head"}


class Cell(NamedTuple):
    drafter: str
    mode: str
    situation: str
    format: str
    nodes: str
    asked: str


ALL_CELLS = [Cell(*values) for values in itertools.product(DRAFTERS, MODES, SITUATIONS, FORMATS, NODES, ASKED)]
DEFAULT_CELLS = pairwise(ALL_CELLS)


class World:
    """The target, a draft model that is nearly it, a head that knows nothing, and what comes without drafts."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target = target
        self.draft_model = folder / "near"
        shutil.copytree(target, self.draft_model)
        generator = torch.Generator().manual_seed(1)
        weights = load_file(target / "model.safetensors")
        off = {name: w + 0.03 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        save_file(off, self.draft_model / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((target / "config.json").read_text())
        head = head_config(config, eagle_aux_hidden_state_layer_ids=[1])
        self.head = write_head(folder / "head", head, head_tensors(head, num_features=1))
        self.num_layers = DecoderConfig.from_folder(target).num_hidden_layers
        self._off: dict[tuple[str, ...], Run] = {}

    def requests(self, cell: Cell) -> list[Request]:
        extra = ASKED[cell.asked]
        found = SITUATIONS[cell.situation].requests(cell.mode)
        return [replace(item, params=replace(item.params, **extra)) for item in found]

    def off(self, cell: Cell) -> Run:
        key = (cell.mode, cell.situation, cell.format, cell.asked)
        if key not in self._off:
            situation = SITUATIONS[cell.situation]
            harness = EngineHarness(self.target, **FORMATS[cell.format], **situation.options)
            self._off[key] = harness.run(self.requests(cell), situation.arrivals)
        return self._off[key]

    def drafter(self, name: str) -> dict[str, Any]:
        """Engine options that make it."""
        options: Mapping[str, dict[str, Any]] = {
            "early_exit": {"early_exit_layers": self.num_layers - 1},
            "draft_model": {"draft_model": str(self.draft_model)},
            "eagle": {"eagle_head": str(self.head)},
            "auto_head": {"eagle_head": str(self.head)},
        }
        return {"drafter": name.removesuffix("_head")} | options.get(name, {})


@pytest.fixture(scope="module")
def world(sharp_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(sharp_llama, tmp_path_factory.mktemp("drafters"))


def predicting(requests: Sequence[Request], off: Run) -> list[Request]:
    """Each asks with its own answer for a prediction, an error in the middle of it."""
    found = []
    for item in requests:
        answer = list(off.answers[f"{item.request_id}/0"])
        answer[len(answer) // 2] = 3
        found.append(replace(item, speculation=replace(item.speculation, prediction=tuple(answer))))
    return found


@pytest.mark.parametrize("cell", cell_params(ALL_CELLS, DEFAULT_CELLS))
def test_on_equals_off(cell: Cell, world: World) -> None:
    situation, off = SITUATIONS[cell.situation], world.off(cell)
    requests = world.requests(cell)
    if cell.drafter == "prediction":
        requests = predicting(requests, off)
    options = world.drafter(cell.drafter) | {"num_draft_tokens": NODES[cell.nodes]}
    harness = EngineHarness(world.target, **FORMATS[cell.format], **options, **situation.options)
    on = harness.run(requests, situation.arrivals)
    assert on.answers == off.answers
    assert on.texts == off.texts
    situation.claim(harness, on, {item.request_id: item for item in requests})
    metrics = harness.engine.metrics
    assert metrics.num_drafter_faults == 0
    assert metrics.speculation.num_draft_tokens > 0
    if cell.drafter in EXPECTED_RIGHT and cell.asked == "plain" and cell.mode == "greedy":
        assert 0 < metrics.speculation.num_accepted_tokens < metrics.speculation.num_draft_tokens
    told = {drafter for end in on.finished.values() for drafter in [end.speculation.drafter]}
    assert options["drafter"] in told


def test_the_default_cells_cover_every_pair() -> None:
    assert all_pairs(DEFAULT_CELLS) == all_pairs(ALL_CELLS)
    assert len(DEFAULT_CELLS) <= 70


def test_trees_of_64_nodes_are_verified(world: World) -> None:
    """Not only allowed: such steps happen."""
    cell = Cell("auto", "greedy", "alone", "fp32", "many", "plain")
    harness = EngineHarness(world.target, dtype="float32", num_draft_tokens=64, **world.drafter("auto"))
    on = harness.run(world.requests(cell), SITUATIONS["alone"].arrivals)
    assert on.answers == world.off(cell).answers
    assert harness.engine.metrics.max_rows_in_step >= 60
