"""Early exit: with all layers it is the target, to the bit; with some it changes nothing but the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import MODES, SITUATIONS, prompt, request
from harness import EngineHarness, Run, sharpen
from specserve_drafts import make_drafter
from specserve_drafts.early_exit import EarlyExitDrafter
from specserve_drafts.grow import Shape

from specserve.config import SpeculationConfig
from specserve.errors import ConfigError
from specserve.proposal import DraftRow

LAYERS = 3
CHAIN = Shape(width=1, branch=1, depth=8)


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(tied=False, hidden=64, layers=LAYERS), tmp_path_factory.mktemp("sharp") / "llama")


def engine_with(folder: Path, num_layers: int, shape: Shape | None, options: Mapping[str, Any]) -> EngineHarness:
    """The drafter takes the n-gram drafter's seat."""
    harness = EngineHarness(folder, "ngram", **options)
    forward: Any = harness.engine._runner
    harness.engine.drafting.drafters["ngram"] = EarlyExitDrafter(forward, num_layers, shape)
    return harness


def totals(harness: EngineHarness, run: Run) -> tuple[int, int]:
    """(drafted, accepted), of a run in which no draft was lost."""
    assert harness.engine.metrics.num_drafter_faults == 0
    told = [end.speculation for end in run.finished.values()]
    return sum(s.num_draft_tokens for s in told), sum(s.num_accepted_tokens for s in told)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_on_equals_off(folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    requests = made.requests(mode)
    options = {"num_draft_tokens": 9, **made.options}
    off = EngineHarness(folder, **options).run(requests, made.arrivals)
    harness = engine_with(folder, LAYERS - 1, Shape(width=3, branch=3, depth=4), options)
    on = harness.run(requests, made.arrivals)
    assert on.answers == off.answers
    made.claim(harness, on, {item.request_id: item for item in requests})
    drafted, accepted = totals(harness, on)
    assert drafted > accepted > 0


@pytest.mark.parametrize("situation", ["alone", "preempted", "prefix_hit", "chunked", "n3"])
@pytest.mark.parametrize("mode", MODES)
def test_all_layers_draw_what_the_target_draws(folder: Path, situation: str, mode: str) -> None:
    made = SITUATIONS[situation]
    harness = engine_with(folder, LAYERS, CHAIN, {"num_draft_tokens": 6, **made.options})
    drafted, accepted = totals(harness, harness.run(made.requests(mode), made.arrivals))
    assert accepted == drafted > 50


def test_it_writes_where_this_step_writes_and_nowhere_else(folder: Path) -> None:
    harness = EngineHarness(folder, "ngram", page_size=4)
    forward: Any = harness.engine._runner
    drafter = EarlyExitDrafter(forward, LAYERS - 1, Shape(width=4, branch=4, depth=4))
    forward.kv.normal_()
    before = forward.kv.clone()
    pages = [9, 3, 12, 7, 5]
    row = DraftRow("s", list(range(10, 21)), 10, 10, seed=1, choice=0, temperature=0.9, salt="", pages=pages)
    [tree] = drafter.propose([row], [8])
    assert len(tree) == 8
    changed = (forward.kv != before).flatten(5).any(5).any(3).any(1)  # [layers, pages, slots]
    assert not changed[LAYERS - 1].any()
    reserved = {(pages[i // 4], i % 4) for i in range(10, 19)}
    found = {(page, slot) for page, slot in torch.nonzero(changed[0]).tolist()}
    assert (pages[10 // 4], 10 % 4) in found
    assert len(found) > 3
    assert found <= reserved


def test_it_drafts_up_to_the_end_of_the_context(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama(layers=LAYERS, max_positions=48)
    harness = engine_with(folder, LAYERS, CHAIN, {"num_draft_tokens": 8})
    run = harness.run([request("long", "greedy", prompt(2, 20), max_tokens=None)])
    drafted, accepted = totals(harness, run)
    assert len(run.answers["long/0"]) == 28
    assert accepted == drafted >= 20


def test_by_name(folder: Path) -> None:
    item = request("named", "sampled", prompt(2, 20))
    harness = EngineHarness(folder, "early_exit", early_exit_layers=LAYERS, num_draft_tokens=1)
    run = harness.run([item])
    drafted, accepted = totals(harness, run)
    assert accepted == drafted > 10
    assert run.finished["named/0"].speculation.drafter == "early_exit"
    assert run.answers == EngineHarness(folder).run([item]).answers


def test_how_many_layers(folder: Path) -> None:
    harness = EngineHarness(folder, "ngram")
    forward: Any = harness.engine._runner
    for wanted, expected in ((None, 2), (1, 1), (3, 3)):
        drafter = make_drafter("early_exit", SpeculationConfig(early_exit_layers=wanted), forward)
        assert isinstance(drafter, EarlyExitDrafter)
        assert drafter.num_layers == expected
    with pytest.raises(ConfigError, match=r"early_exit_layers is 4; the model has 3 layers"):
        make_drafter("early_exit", SpeculationConfig(early_exit_layers=4), forward)
    with pytest.raises(ValueError, match="early_exit"):
        make_drafter("early_exit", SpeculationConfig(), None)
