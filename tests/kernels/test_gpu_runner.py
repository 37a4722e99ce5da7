"""The GPU runner on CPU tensors: Triton's interpreter for its kernels, a call for each graph, everything else as it is.

Beside it runs a CPU runner over the same kernels: logits and the whole pool must have the same bits after every step,
so padding is seen by nobody and written nowhere. What is not shown here is what a graph captures.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch
from triton_case import EXACT, FAST, bits  # first: it chooses the interpreter

# isort: split
from cells import prompt
from drafters import CountingDrafter, OracleDrafter, RandomTreeDrafter
from harness import EngineHarness
from specserve_kernels import Ops
from specserve_kernels.triton import launch
from tiny import TinyLlama
from triton import knobs

from specserve.batch import StepBatch
from specserve.buckets import ALONE, Bucket
from specserve.events import Token
from specserve.gpu_runner import NOWHERE, GpuRunner, StaticInputs
from specserve.graphs import DirectCalls
from specserve.models.weights import load_decoder
from specserve.pages import Move
from specserve.request import Request, SamplingParams
from specserve.runner import CpuRunner, ForwardResult

BENCH = Path(__file__).resolve().parents[2] / "bench"
PAGE, PAGES, LENGTH = 4, 16, 32
OPTIONS = {"page_size": PAGE, "num_pages": PAGES, "max_model_len": LENGTH, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tiny_llama: TinyLlama) -> Path:
    return tiny_llama(layers=1, tied=False)


def gpu_runner(folder: Path, ops: object = EXACT, max_rows: int = 8) -> GpuRunner:
    decoder = load_decoder(folder, cast(Ops, ops), device=torch.device("cpu"))
    runner = GpuRunner(decoder, PAGES, PAGE, DirectCalls(), max_rows=max_rows, max_pages=LENGTH // PAGE)
    runner.kv.fill_(float("nan"))
    return runner


class Both:
    """A GPU runner and a CPU runner side by side; their pools start as NaN, and each step is compared."""

    def __init__(self, folder: Path) -> None:
        self.gpu = gpu_runner(folder, max_rows=16)
        self.cpu = CpuRunner(self.gpu.decoder, self.gpu.ops, PAGES, PAGE)
        for runner in (self.gpu, self.cpu):
            runner.kept.keep(hidden=True, feature_layers=(0,))
            runner.kv.fill_(float("nan"))
            for kept in runner.kept._all():
                kept.fill_(float("nan"))
        self.buckets: list[Bucket | None] = []
        self.num_padded = 0

    def forward(self, batch: StepBatch) -> ForwardResult:
        return self.launch(batch)()

    def launch(self, batch: StepBatch) -> Callable[[], ForwardResult]:
        bucket = self.gpu.bucket_of(batch)
        self.buckets.append(bucket)
        self.num_padded += bucket is not None and bucket.rows > batch.num_rows
        wait, expected = self.gpu.launch(batch), self.cpu.forward(batch)

        def compared() -> ForwardResult:
            found = wait()
            assert torch.equal(bits(found.logits), bits(expected.logits))
            assert found.finite == expected.finite
            assert list(found.largest) == expected.logits.argmax(1).tolist()
            self.compare()
            return found

        return compared

    def apply(self, moves: Sequence[Move], *, copies: bool = False) -> None:
        for runner in (self.gpu, self.cpu):
            runner.apply(moves, copies=copies)
        self.compare()

    def zero(self, pages: Iterable[int]) -> None:
        raise AssertionError("nothing here is to be wiped")

    def compare(self) -> None:
        """Every slot, those that nobody wrote too."""
        assert torch.equal(bits(self.gpu.kv), bits(self.cpu.kv))
        for mine, other in zip(self.gpu.kept._all(), self.cpu.kept._all(), strict=True):
            assert torch.equal(bits(mine), bits(other))


def requests() -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return [Request(request_id=f"r{n}", prompt_token_ids=prompt(n, n), params=params) for n in (3, 6, 5)]


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[int]]:
    """Prompt and answer of each sequence, by the engine as it is on this machine, without drafts."""
    asked = requests()
    return EngineHarness(folder, "off", **OPTIONS).run(asked).full(asked)


def drafter_of(name: str, answers: dict[str, list[int]]) -> CountingDrafter | str:
    if name == "off":
        return "off"
    return OracleDrafter(answers) if name == "chain" else RandomTreeDrafter(3, 250, answers, true_share=0.8)


@pytest.mark.parametrize(("drafts", "ahead"), [("off", True), ("chain", False), ("tree", False), ("tree", True)])
def test_steps_have_the_bits_of_the_cpu_runner(
    folder: Path, answers: dict[str, list[int]], drafts: str, ahead: bool
) -> None:
    harness = EngineHarness(folder, drafter_of(drafts, answers), num_draft_tokens=3, **OPTIONS)
    both = Both(folder)
    harness.engine._runner, harness.engine._ops = both, both.gpu.ops
    harness.engine._ahead = both.launch if ahead else None
    asked = requests()
    assert harness.run(asked).full(asked) == answers
    used = {bucket for bucket in both.buckets if bucket is not None}
    assert None in both.buckets  # the prompts
    deepest = {"off": [ALONE], "chain": [0], "tree": [1, 64]}[drafts]  # a chain has no tail, and no mask
    assert deepest[0] <= max(bucket.depth for bucket in used) <= deepest[-1]
    assert both.num_padded > 0
    if drafts == "tree":
        assert harness.engine.metrics.num_compacted_slots > 0
    assert harness.engine.metrics.waits.get("host_drafter", 0) == (
        0 if drafts == "off" else sum(bucket.depth > ALONE for bucket in both.buckets if bucket is not None)
    )


def test_fast_numerics_draw_the_same_ids_where_nothing_is_near(folder: Path, answers: dict[str, list[int]]) -> None:
    harness = EngineHarness(folder, drafter_of("tree", answers), num_draft_tokens=3, **OPTIONS)
    runner = gpu_runner(folder, FAST)
    harness.engine._runner, harness.engine._ops = runner, runner.ops
    asked = requests()
    assert harness.run(asked).full(asked) == answers


def run_after_an_end(
    folder: Path, answers: dict[str, list[int]], ops: object, poisoned: bool
) -> tuple[dict[str, list[Token]], set[int]]:
    """What two requests are told after one that ended; and which of its pages they had with NaN in other slots.

    `poisoned`: when it has ended, NaN fills every page that is free.
    """
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    short, _, first = (replace(request, params=params) for request in requests())
    again = replace(first, request_id="again", prompt_token_ids=tuple(answers["r5/0"]))
    harness = EngineHarness(folder, drafter_of("tree", answers), num_draft_tokens=3, **OPTIONS)
    runner, pool, beside = gpu_runner(folder, ops), harness.engine.pool, set[int]()

    def launch(batch: StepBatch) -> Callable[[], ForwardResult]:
        wait = runner.launch(batch)
        for page in {page for span in batch.spans for page in span.sequence.table.pages}:
            nan = runner.kv[:, :, page].isnan()
            beside.update([page] if nan.any() and not nan.all() else [])
        return wait

    harness.engine._runner, harness.engine._ops, harness.engine._ahead = runner, runner.ops, launch
    runner.kv.zero_()
    harness.run([first])
    freed = {page for page in pool._free if runner.kv[:, :, page].any()}
    if poisoned:
        runner.kv[:, :, pool._free] = float("nan")
    run = harness.run([short, again])
    assert run.started["again"].cached_tokens == PAGE  # the end left a page that is kept, too
    return run.tokens, freed & beside


@pytest.mark.parametrize("ops", [EXACT, FAST], ids=["exact", "fast"])
def test_nobody_sees_what_is_in_a_freed_page(folder: Path, answers: dict[str, list[int]], ops: object) -> None:
    """NaN in every free page changes no token and no log-probability."""
    told, beside = run_after_an_end(folder, answers, ops, poisoned=True)
    assert beside and told == run_after_an_end(folder, answers, ops, poisoned=False)[0]


def test_sampled_rows_are_drawn_without_reading_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=5, ignore_eos=True)
    asked = [Request(request_id="r", prompt_token_ids=prompt(1, 5), params=params)]
    expected = EngineHarness(folder, "off", **OPTIONS).run(asked).answers
    harness, runner = EngineHarness(folder, "off", **OPTIONS), gpu_runner(folder)
    harness.engine._runner, harness.engine._ops = runner, runner.ops

    def refuse(*_: object) -> None:
        raise AssertionError("a row of logits went through the host")

    monkeypatch.setattr("specserve.sample.processed", refuse)
    assert harness.run(asked).answers == expected


def test_padding_alone_is_written_nowhere(folder: Path) -> None:
    static = StaticInputs(Bucket(4, 8, 2), 4, torch.device("cpu"))
    rows = static.inputs.rows
    assert static.inputs.slots.tolist() == [NOWHERE] * 4
    assert rows.prefix_len.tolist() == rows.tail_len.tolist() == [0] * 4
    assert rows.tiles.tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]


def test_warming_up_captures_every_bucket_and_touches_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.gpu_runner.WARM_ROWS", (1,))
    monkeypatch.setattr("specserve.gpu_runner.WARM_MOVES", (1, 2))
    runner, captured = gpu_runner(folder, max_rows=2), []
    monkeypatch.setattr(runner, "_graphs", DirectCalls())
    monkeypatch.setattr(DirectCalls, "capture", lambda self, work: captured.append(work) or work)
    runner.warm_up()
    assert len(captured) == len(runner.buckets.known) == 3  # one row; two rows of two sequences, and of one
    with torch.inference_mode():
        for work in captured:
            work()
    assert runner.kv.isnan().all()


def test_the_bench_runs_without_a_gpu(tmp_path: Path) -> None:
    """`--smoke`, in a process of its own; without it the command says that there is no GPU, and ends well."""
    bench = BENCH / "gpu.py"
    if not torch.cuda.is_available():
        said = subprocess.run([sys.executable, bench], capture_output=True, text=True, check=True).stdout
        assert "no GPU here" in said and "nothing was measured" in said
    script = f"import sys, runpy, results; results.FOLDER = __import__('pathlib').Path({str(tmp_path)!r});"
    script += f"sys.argv = ['gpu.py', '--smoke']; runpy.run_path({str(bench)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(bench.parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_smoke.json").read_text())
    lines = found["lines"]
    assert {line["part"] for line in lines} == {"copy", "difference", "attention", "GEMMs", "end to end", "step"}
    assert {line["verdict"] for line in lines} == {"", "ok"}  # nothing failed, and nothing was left out
    checked = {line["case"] for line in lines if line["verdict"] == "ok"}
    assert {f"{name}, 1 x 24, {rows} rows" for name in ("SDPA", "FlexAttention", "fast") for rows in (1, 3)} <= checked
    assert "tiny exact, 3 nodes in a tree, right 80% of the time" in checked
    assert set(found["tables"]) == {"Measured", "Targets"} and "no figure means anything" in found["device"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """`bench/gpu.py` in this process; its results go to a folder of the test's own."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke"])
    monkeypatch.setattr(importlib.import_module("results"), "FOLDER", tmp_path)
    yield importlib.import_module("gpu")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.mark.parametrize("difference", [1.0, float("nan")])
def test_a_wrong_result_ends_the_bench_with_1(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, difference: float
) -> None:
    stages, frame = (importlib.import_module(name) for name in ("gpu_stages", "gpu_frame"))
    line = frame.Line("end to end", "exact").checked(difference, 0)
    monkeypatch.setattr(stages, "measure", lambda bench: bench.tell(line))
    with pytest.raises(SystemExit, match="not what they must be: 1"):
        bench.main()
    assert json.loads((tmp_path / "gpu_smoke.json").read_text())["lines"][0]["verdict"] == "FAILED"


def test_the_bench_names_what_it_leaves_out(bench: ModuleType) -> None:
    """A stage whose budget is used does not begin; one that raises is a failed line, and the next one begins."""
    frame = importlib.import_module("gpu_frame")
    measured = frame.Bench(frame.SMOKE, torch.device("cpu"))
    begun: list[str] = []
    measured.attempt("step", "late", 0.0, lambda: begun.append("late"))
    measured.attempt("step", "wrong", 1.0, lambda: begun.append(str(1 // 0)))
    measured.attempt("step", "good", 1.0, lambda: begun.append("good"))
    measured.compiled = 91.0
    measured.attempt("step", "new", 1.0, lambda: begun.append("new"))
    assert begun == ["good"]
    said = ["left out: the budget of time is used", "FAILED", "left out: the budget of compiling is used"]
    assert [line.verdict.partition(": Zero")[0] for line in measured.lines] == said
    assert bench.target("compiling, s", measured.compiled, most=90)[-1] == "missed"
    assert bench.target("compiling, s", 90.0, most=90)[-1] == "met"
    assert bench.target("compiling, s", None, most=90)[-1] == "not measured"


def test_a_layer_is_as_few_launches_as_the_kernels_allow(folder: Path) -> None:
    """The sums are made by the norms after them, and the rotation writes K and V."""
    decoder = load_decoder(folder, cast(Ops, EXACT), device=torch.device("cpu"))
    layers = decoder.config.num_hidden_layers
    batch = StaticInputs(Bucket(2, 0, 2), 4, torch.device("cpu")).inputs
    kv = torch.zeros(decoder.config.kv_shape(2, 16), dtype=decoder.dtype)
    with launch.recording() as launches:
        decoder.run(batch.ids, batch.positions, batch.slots, batch.rows, kv)
    found = Counter(made.kernel.__name__.removesuffix("_kernel") for made in launches)
    assert found == {
        "embed": 1,
        "rms_norm": 1 + 2 * layers,
        "linear": 4 * layers,
        "rope_write_kv": layers,
        "attend": layers,
        "merge": layers,
        "silu_mul": layers,
    }
