"""Drafters with weights beside a GPU's runner, on CPU tensors under Triton's interpreter.

Their trees are held against those over the CPU's runner and torch's operations, and answers against those without
drafts. What a real device adds, tensors that lie apart, is shown in tests/drafts/test_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import specserve_kernels
import torch
from triton_case import EXACT, FAST  # first: it chooses the interpreter

# isort: split
from cells import prompt, request
from eagle_files import near_perfect_head, write_head, write_one_layer_target
from harness import EngineHarness, Run, blur, sharpen
from paged_case import Row, build_case
from paged_case import Shape as PagedShape
from specserve_drafts import draft_footprint, make_drafter
from specserve_drafts.draft_model import DraftModelDrafter
from specserve_drafts.eagle import EagleDrafter
from specserve_drafts.eagle_checkpoint import load_checkpoint
from specserve_drafts.eagle_head import EagleHead
from specserve_drafts.early_exit import EarlyExitDrafter
from specserve_drafts.grow import Shape
from specserve_kernels import Ops
from tiny import TinyLlama

from specserve import build
from specserve.config import EngineConfig, SpeculationConfig
from specserve.forward import Forward
from specserve.gpu_runner import GpuRunner
from specserve.graphs import DirectCalls
from specserve.models.weights import load_decoder
from specserve.proposal import Drafter, DraftRow, DraftTree, StepResult
from specserve.request import Request
from specserve.runner import CpuRunner

PAGE, PAGES, LENGTH = 4, 24, 48
OPTIONS = {"page_size": PAGE, "num_pages": PAGES, "max_model_len": LENGTH, "max_num_seqs": 2, "num_draft_tokens": 4}
TREE = Shape(width=2, branch=3, depth=3)
CHAIN = Shape(width=1, branch=1, depth=4)
WINDOW = 2048


@dataclass(frozen=True)
class Case:
    """A target, and how a drafter of one kind is made for it."""

    folder: Path
    make: Callable[[Any], Drafter]


@pytest.fixture(scope="module")
def sharp(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(tiny_llama(heads=2, kv_heads=1, tied=False), tmp_path_factory.mktemp("sharp") / "llama")


@pytest.fixture(scope="module")
def near(sharp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blur(sharp, tmp_path_factory.mktemp("near") / "llama", 0.05)


@pytest.fixture(scope="module")
def cases(sharp: Path, near: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    one_layer = write_one_layer_target(tmp_path_factory.mktemp("target"))
    head = write_head(tmp_path_factory.mktemp("head"), *near_perfect_head(one_layer))

    def draft_model(forward: Forward) -> Drafter:
        return DraftModelDrafter(forward, load_decoder(near, forward.ops), WINDOW, shape=TREE)

    def early_exit(forward: Forward) -> Drafter:
        return EarlyExitDrafter(forward, 1, TREE)

    def eagle(forward: Forward) -> Drafter:
        checkpoint = load_checkpoint(head, forward.decoder.config)
        return EagleDrafter(forward, EagleHead(checkpoint, forward.decoder), WINDOW, TREE)

    return {
        "draft_model": Case(sharp, draft_model),
        "early_exit": Case(sharp, early_exit),
        "eagle": Case(one_layer, eagle),
    }


@dataclass
class Recorder:
    """A drafter, and what it drafted: (tokens so far, cap) → ids and parents of the tree."""

    drafter: Drafter
    seen: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    wants_top_ids: bool = False

    @property
    def name(self) -> str:
        return self.drafter.name

    def start(self, view: DraftRow) -> None:
        self.drafter.start(view)

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> Sequence[DraftTree]:
        trees = self.drafter.propose(rows, caps)
        for row, cap, tree in zip(rows, caps, trees, strict=True):
            self.seen[tuple(row.token_ids), cap] = (tree.token_ids, tree.parents)
        return trees

    def observe(self, view: DraftRow, result: StepResult) -> None:
        self.drafter.observe(view, result)

    def stop(self, view: DraftRow) -> None:
        self.drafter.stop(view)


def requests() -> list[Request]:
    return [
        request("greedy", "greedy", prompt(3, 5), max_tokens=7),
        request("sampled", "sampled", prompt(6, 9), max_tokens=7, seed=2**63 + 1),
    ]


def gpu_runner(folder: Path, ops: object, max_rows: int = 16) -> GpuRunner:
    decoder = load_decoder(folder, cast(Ops, ops), device=torch.device("cpu"))
    runner = GpuRunner(decoder, PAGES, PAGE, DirectCalls(), max_rows=max_rows, max_pages=LENGTH // PAGE)
    runner.kv.fill_(float("nan"))
    return runner


def poison(runner: CpuRunner | GpuRunner) -> None:
    """What drafters keep and never wrote is NaN, too."""
    for tensor in (*runner.kept._all(), *runner._groups):
        tensor.fill_(float("nan"))


def drafted(case: Case, ops: object | None, drafter: Callable[[Any], Drafter]) -> tuple[EngineHarness, Recorder, Run]:
    """A run with drafts, over the GPU's runner with these operations; None: over the CPU's with torch's."""
    harness = EngineHarness(case.folder, "ngram", kernels="torch", **OPTIONS)
    runner: Any = harness.engine._runner
    if ops is not None:
        runner = gpu_runner(case.folder, ops)
        harness.engine._runner, harness.engine._ops = runner, runner.ops
        harness.engine._ahead = runner.launch
    recorder = Recorder(drafter(runner))
    poison(runner)
    harness.engine.drafting.drafters["ngram"] = recorder
    return harness, recorder, harness.run(requests())


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        pytest.param("draft_model", EXACT, id="draft_model-exact"),
        pytest.param("early_exit", EXACT, id="early_exit-exact"),
        pytest.param("eagle", FAST, id="eagle-fast"),  # its tails are the farthest from a prefix
        pytest.param("draft_model", FAST, id="draft_model-fast", marks=pytest.mark.slow),
        pytest.param("early_exit", FAST, id="early_exit-fast", marks=pytest.mark.slow),
        pytest.param("eagle", EXACT, id="eagle-exact", marks=pytest.mark.slow),
    ],
)
def test_trees_are_those_of_the_cpu_and_answers_those_without(cases: dict[str, Case], kind: str, ops: object) -> None:
    case = cases[kind]
    plain = EngineHarness(case.folder, "off", kernels="torch", **OPTIONS).run(requests()).answers
    _, expected, _ = drafted(case, None, case.make)
    assert any(parents and parents.count(-1) > 1 for _, parents in expected.seen.values()), "no tree branches"
    harness, recorder, run = drafted(case, ops, case.make)
    assert recorder.seen == expected.seen
    assert run.answers == plain
    told = [end.speculation for end in run.finished.values()]
    num_drafted, accepted = sum(s.num_draft_tokens for s in told), sum(s.num_accepted_tokens for s in told)
    assert harness.engine.metrics.num_drafter_faults == 0
    assert num_drafted > accepted > 0 and harness.engine.metrics.num_compacted_slots > 0
    with_nodes = {key for key, (ids, _) in recorder.seen.items() if ids}
    assert 0 < harness.engine.metrics.waits["host_drafter"] <= len(with_nodes)


@pytest.mark.parametrize(
    "ops", [pytest.param(EXACT, id="exact", marks=pytest.mark.slow), pytest.param(FAST, id="fast")]
)
def test_the_target_as_its_own_draft_model_is_always_right(sharp: Path, ops: object) -> None:
    def itself(forward: Forward) -> Drafter:
        return DraftModelDrafter(forward, forward.decoder, WINDOW, shape=CHAIN)

    case = Case(sharp, itself)
    harness, _, run = drafted(case, ops, itself)
    told = [end.speculation for end in run.finished.values()]
    assert harness.engine.metrics.num_drafter_faults == 0
    assert sum(s.num_accepted_tokens for s in told) == sum(s.num_draft_tokens for s in told) > 6
    assert run.answers == EngineHarness(sharp, "off", kernels="torch", **OPTIONS).run(requests()).answers


def test_rows_without_a_plan_may_have_tails_anywhere() -> None:
    """As those of an EAGLE head have, which see the rest of their first page last."""
    rows = [Row(0, 9, (9, 150)), Row(1, 40, (130,)), Row(1, 3)]
    case = build_case(PagedShape(heads=2, kv_heads=1, dim=16, page_size=16), rows, torch.float32)
    found = case.run(cast(Ops, FAST))
    assert torch.equal(found, case.run(cast(Ops, EXACT)))
    torch.testing.assert_close(found, case.run(specserve_kernels.load("reference")))


# ---- how an engine is built


def test_drafters_are_made_for_any_device(sharp: Path, near: Path) -> None:
    runner = gpu_runner(sharp, EXACT)
    config = SpeculationConfig(draft_model=str(near), early_exit_layers=1)
    made = build.make_drafters(config, runner)
    assert {"draft_model", "early_exit", "auto"} <= made.keys()
    assert build.make_drafters(config, None).keys() & {"draft_model", "early_exit"} == set()


def test_warming_up_grows_a_tree_of_each_and_leaves_nothing_behind(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuRunner, "warm_up", lambda self: None)
    case = cases["draft_model"]
    runner = gpu_runner(case.folder, EXACT)
    drafters = {"draft_model": case.make(runner), "early_exit": EarlyExitDrafter(runner, 1, TREE)}
    poison(runner)
    recorders = {name: Recorder(drafter) for name, drafter in drafters.items()}
    build.warm_up(runner, recorders)
    for recorder in recorders.values():
        assert recorder.seen[(0,), build.WARM_NODES][0], "no level was run"
    assert not drafters["draft_model"]._layers._filled and not drafters["draft_model"]._layers._content
    assert not any(drafter._trees._proposed for drafter in drafters.values())
    written = ~runner.kv.isnan().all(dim=5).all(dim=3)  # [layers, 2, pages, slots]
    assert written[0].any() and not written[1].any(), "early exit writes its own layers"
    assert not written[:, :, -(-(1 + build.WARM_NODES) // PAGE) :].any()


# ---- memory


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_the_pool_gets_what_drafters_leave(
    cases: dict[str, Case], near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    case, device, held = cases[kind], 4 << 30, 100 << 20
    decoder = load_decoder(case.folder, cast(Ops, EXACT))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda on: (device - held, device))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda on: held)
    head = write_head(tmp_path, *near_perfect_head(case.folder)) if kind == "eagle" else None
    named = {"draft_model": str(near)} if head is None else {"eagle_head": str(head)}
    options: dict[str, Any] = {"model": str(case.folder), "device": "cuda", "drafter": "off", "max_model_len": 64}
    page_bytes, lines = [], []
    for more in ({}, named):
        config = EngineConfig.from_options(**options, **more)
        shared, told = build.share_memory(config, decoder)
        assert shared.cache.num_pages is not None
        drafts = draft_footprint(config, decoder.config, 4, decoder.fingerprint)
        per_token = build.kv_bytes_per_token(decoder.config, 4) + drafts.per_token
        page_bytes.append(shared.cache.num_pages * per_token * shared.cache.page_size)
        lines += told
    without, with_drafter = page_bytes
    assert drafts.fixed > 1 << 20
    assert without - with_drafter == pytest.approx(drafts.fixed, abs=2 * per_token * 16)
    assert "drafters" not in lines[0] and "drafters" in lines[1]
    assert make_drafter(kind, SpeculationConfig(**named), gpu_runner(case.folder, EXACT)).name == kind
