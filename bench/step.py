"""The cost of one step and of its parts, against the floor that memory sets: one command, one JSON.

The floor of a step is its GEMMs, packed as the engine packs them and timed back to back, plus the time to read as many
bytes as its KV has from a buffer of that size. Whatever a step takes beyond that is ours to answer for. All figures of
one table row are taken in turns, so that they share the machine's moods; medians are compared, never minima.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import specserve_kernels
import torch
from library_ops import LibraryOps, OneCallGemms, product, reordered
from results import FORMATS, PROMPTS, interleaved, known_formats, medians, table, write
from specserve_kernels import LinearWeight, Ops
from torch import Tensor

import specserve.drawing
from specserve import batch
from specserve.batch import StepBatch
from specserve.build import build, describe_environment
from specserve.config import EngineConfig
from specserve.events import Event
from specserve.models.decoder import Decoder
from specserve.models.hub import resolve_model
from specserve.models.weights import load_decoder
from specserve.pages import PagePool, PageTable
from specserve.prompts import read_prompts
from specserve.proposal import EMPTY_TREE, DraftTree
from specserve.request import Request, SamplingParams, Sequence
from specserve.runner import CpuRunner
from specserve.sample import Draw, draw_tokens
from specserve.scheduler import PlannedRows
from specserve.server.grpc import to_response

PAGE = 16
CHUNK = 512  # tokens of a prompt chunk, as max_num_batched_tokens has it
TREE_NODES = 15  # a step of 16 rows: the root and 15 nodes


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: so many sequences, each with so much context and so many draft nodes."""

    sequences: int
    context: int
    nodes: int = 0

    @property
    def rows(self) -> int:
        return self.sequences * (1 + self.nodes)

    @property
    def name(self) -> str:
        return f"tree of {self.rows}" if self.nodes else f"{self.sequences} sequences"


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with its operations, and what its format is called."""

    name: str
    decoder: Decoder
    ops: Ops

    def runner(self, pool: PagePool) -> CpuRunner:
        """A runner whose whole pool is in memory and finite."""
        runner = CpuRunner(self.decoder, self.ops, pool.num_pages, pool.page_size)
        runner.kv[0].normal_()
        runner.kv[1:] = runner.kv[0]
        return runner

    @property
    def linears(self) -> list[LinearWeight]:
        """The matrices of one forward, without the head."""
        return [
            w for layer in self.decoder.weights.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]


def load(folder: Any, name: str, ops: Ops) -> Model:
    return Model(name, load_decoder(folder, ops, **FORMATS[name]), ops)


# ---- one step


def planned(case: Case, pool: PagePool, vocab_size: int) -> tuple[list[PlannedRows], list[DraftTree]]:
    """Sequences with their context cached, each about to run its root and its nodes."""
    source = torch.Generator().manual_seed(case.context + case.rows)
    plans, tree = [], DraftTree()
    if case.nodes:  # two children a node
        guesses = tuple(torch.randperm(vocab_size, generator=source)[: case.nodes].tolist())
        tree = DraftTree(guesses, tuple(i // 2 - 1 for i in range(case.nodes)), ("bench",) * case.nodes)
    for index in range(case.sequences):
        ids = torch.randint(vocab_size, (case.context + 1,), generator=source).tolist()
        table_ = PageTable(pool)
        table_.try_reserve(case.context)
        table_.commit(case.context)
        table_.try_reserve(1 + case.nodes)
        request = Request(request_id=f"bench-{index}", prompt_token_ids=tuple(ids[:-1]))
        sequence = Sequence(request=request, choice=0, seed=index, arrival=index, token_ids=ids, table=table_)
        plans.append(
            PlannedRows(sequence=sequence, num_pending=1, draws=True, node_cap=case.nodes, max_depth=case.nodes)
        )
    return plans, [tree] * case.sequences


def gemms(model: Model, rows: int) -> Callable[[], None]:
    """Every matrix of a forward once, and the head."""
    decoder, ops = model.decoder, model.ops
    inputs = _inputs(model.linears, rows, decoder.dtype)
    hidden = torch.randn(rows, decoder.config.hidden_size).to(decoder.dtype)

    def run() -> None:
        for weight, x in zip(model.linears, inputs, strict=True):
            ops.linear(x, weight)
        ops.linear(hidden, decoder.weights.head, out_dtype=torch.float32)

    return run


def one_dnn_gemms(model: Model, rows: int) -> Callable[[], None] | None:
    """The same matrices as single oneDNN calls with weights reordered for so many rows."""
    raws = [weight.raw for weight in (*model.linears, model.decoder.weights.head)]
    if any(raw is None or not raw.is_floating_point() for raw in raws):
        return None
    packed = [reordered(raw, rows) for raw in raws]
    inputs = _inputs([*model.linears, model.decoder.weights.head], rows, model.decoder.dtype)

    def run() -> None:
        for raw, matrix, x in zip(raws, packed, inputs, strict=True):
            product(x, matrix, raw)

    return run


def _inputs(weights: list[LinearWeight], rows: int, dtype: torch.dtype) -> list[Tensor]:
    made = {width: torch.randn(rows, width).to(dtype) for width in {w.raw.shape[1] for w in weights}}
    return [made[weight.raw.shape[1]] for weight in weights]


def step_work(model: Model, case: Case) -> dict[str, Callable[[], object]]:
    """What is timed for one row of the table."""
    config = model.decoder.config
    pages = case.sequences * (-(-(case.context + 1 + case.nodes) // PAGE) + 1)
    pool = PagePool(pages, PAGE)
    runner = model.runner(pool)
    plans, trees = planned(case, pool, config.vocab_size)
    step = batch.build(plans, trees)
    token_bytes = runner.kv[:, :, 0, :, 0].numel() * runner.kv.element_size()
    buffer = torch.ones(case.sequences * case.context * token_bytes // 8, dtype=torch.int64)
    hidden = torch.randn(case.rows, config.hidden_size).to(model.decoder.dtype)
    work: dict[str, Callable[[], object]] = {
        "step": lambda: runner.forward(step),
        "decoder": lambda: model.decoder.forward(step.ids, step.positions, step.slots, step.attention, runner.kv),
        "head": lambda: model.decoder.logits(hidden),
        "build": lambda: batch.build(plans, trees),
        "gemms": gemms(model, case.rows),
        "kv": buffer.sum,
    }
    library = one_dnn_gemms(model, case.rows)
    return work if library is None else {**work, "onednn": library}


def step_table(model: Model, cases: list[Case], seconds: float) -> tuple[list[dict[str, Any]], str]:
    found = []
    for case in cases:
        took = medians(interleaved(step_work(model, case), seconds))
        floor = took["gemms"] + took["kv"]
        ratios = {"floor": floor, "ratio": took["step"] / floor, "gemms_to_onednn": None}
        if "onednn" in took:
            ratios["gemms_to_onednn"] = took["gemms"] / took["onednn"]
        found.append({"case": case.name, "context": case.context, **took, **ratios})
    columns = ("case", "context", "step", "floor", "ratio", "decoder", "head", "build", "gemms", "kv", "onednn",
               "gemms_to_onednn")  # fmt: skip
    return found, table(columns, [[row.get(name) for name in columns] for row in found])


# ---- prefill, exactness, sampling


def chunks(model: Model, num_tokens: int) -> Callable[[], None]:
    """A prompt of so many tokens in chunks, as the scheduler cuts it; every call writes it again."""
    pool = PagePool(-(-num_tokens // PAGE), PAGE)
    runner = model.runner(pool)
    ids = torch.randint(model.decoder.config.vocab_size, (num_tokens,)).tolist()
    table_ = PageTable(pool)
    request = Request(request_id="bench", prompt_token_ids=tuple(ids))
    sequence = Sequence(request=request, choice=0, seed=0, arrival=0, token_ids=ids, table=table_)
    steps: list[StepBatch] = []
    for start in range(0, num_tokens, CHUNK):
        count = min(CHUNK, num_tokens - start)
        table_.try_reserve(count)
        plan = PlannedRows(sequence=sequence, num_pending=count, draws=start + count == num_tokens)
        steps.append(batch.build([plan], [EMPTY_TREE]))
        table_.commit(count)

    def run() -> None:
        for step in steps:
            runner.forward(step)

    return run


def prefill_table(ours: Model, single: Model, lengths: list[int], seconds: float) -> tuple[list[dict[str, Any]], str]:
    found = []
    for length in lengths:
        took = medians(interleaved({"ours": chunks(ours, length), "single": chunks(single, length)}, seconds))
        rates = {name: 1e3 * length / ms for name, ms in took.items()}
        found.append({"tokens": length, **rates, "ratio": rates["ours"] / rates["single"]})
    return found, table(("tokens", "ours tok/s", "one call a GEMM tok/s", "ratio"), [list(r.values()) for r in found])


def exact_table(models: dict[str, Model], seconds: float, context: int) -> tuple[list[dict[str, Any]], str]:
    """Steps of 1, 8 and 32 rows on every backend, against plain library calls."""
    found = []
    for rows in (1, 8, 32):
        case = Case(rows, context)
        took = medians(interleaved({name: step_work(model, case)["step"] for name, model in models.items()}, seconds))
        ratios = {f"{name}_ratio": took[name] / took["library"] for name in took if name != "library"}
        found.append({"rows": rows, **took, **ratios})
    return found, table(list(found[0]), [list(row.values()) for row in found])


def sampling_table(model: Model, context: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Drawing at 16 rows, greedy and at T > 0, as a share of the step that it ends."""
    vocab_size = model.decoder.config.vocab_size
    logits = 3.0 * torch.randn(16, vocab_size)
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "T = 0.8": SamplingParams(temperature=0.8),
        "T = 0.8, top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    }

    def draw(params: SamplingParams) -> Callable[[], object]:
        draws = [Draw(row=i, draw_index=context + i, choice=0, seed=i, params=params) for i in range(16)]
        return lambda: draw_tokens(logits, draws, model.ops)

    work = {"step": step_work(model, Case(16, context))["step"], **{name: draw(p) for name, p in kinds.items()}}
    took = medians(interleaved(work, seconds))
    rows = [[name, took[name], took[name] / (took["step"] + took[name])] for name in kinds]
    return {**took, "shares": {name: share for name, _, share in rows}}, table(
        ("drawing", "ms", "share of a step"), rows
    )


# ---- host overhead


class _Timed:
    """A runner that notes how long it was away."""

    def __init__(self, inner: Any, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, step: StepBatch) -> Any:
        return timed(self._inner.forward, self._spent)(step)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = function(*args, **kwargs)
        spent[0] += time.perf_counter() - start
        return found

    return run


@contextmanager
def away(engine: Any) -> Iterator[list[float]]:
    """Seconds that an engine spent in forwards and in drawing, while inside."""
    spent = [0.0]
    module: Any = specserve.drawing
    runner, drawing = engine._runner, {name: getattr(module, name) for name in ("draw_tokens", "largest_ids")}
    engine._runner = _Timed(runner, spent)
    for name, function in drawing.items():
        setattr(module, name, timed(function, spent))
    try:
        yield spent
    finally:
        engine._runner = runner
        for name, function in drawing.items():
            setattr(module, name, function)


def host_table(folder: Any, num_requests: int, num_tokens: int) -> tuple[dict[str, Any], str]:
    """Of our own prompts, and of a text that repeats itself: nearly every draft is right, a step has many tokens."""
    texts = [text for _, text in read_prompts(PROMPTS)]
    chosen = texts[:: len(texts) // num_requests][:num_requests]
    repeating = [f"{index} apples and {index} pears, " * 8 for index in range(num_requests)]
    found = {
        name: host_overhead(folder, prompts, num_tokens)
        for name, prompts in (("own prompts", chosen), ("repeating text", repeating))
    }
    columns = list(found["own prompts"])
    rows = [(name, *measured.values()) for name, measured in found.items()]
    return found, table(("requests", *columns), rows)


def host_overhead(folder: Any, prompts: list[str], num_tokens: int) -> dict[str, float]:
    """Milliseconds a step from plan to events, forward and drawing excluded, with all requests decoding."""
    # the n-gram drafter and a fixed length: Python's part must not hang on what the controller chooses
    options = {"kv_cache_gib": 0.5, "max_num_seqs": len(prompts), "drafter": "ngram", "num_draft_tokens": 5}
    options |= {"max_num_batched_tokens": 512 * len(prompts)}  # all begin in one step
    built = build(EngineConfig.from_options(model=str(folder), **options))
    engine = built.engine
    gc.collect()
    gc.freeze()  # as `specserve serve` does
    requests, longest = {}, min(512, engine.limits.max_model_len - num_tokens)
    for index, text in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt, now = built.tokenizer.encode(text)[:longest], engine.clock()
        request = Request(request_id=str(index), prompt_token_ids=tuple(prompt), params=params, arrival_time=now)
        requests[request.request_id] = request
        engine.submit(request)
    steps, writes, tokens = [], [], []
    with away(engine) as spent:
        while engine.has_work():
            before, start, told = spent[0], time.perf_counter(), engine.metrics.num_output_tokens
            events = engine.step()
            took = time.perf_counter() - start - (spent[0] - before)
            written = _written(events, requests)
            if len(engine.scheduler.running) == len(prompts) and not engine.scheduler.waiting:
                steps.append(1e3 * took)
                writes.append(1e3 * written)
                tokens.append(engine.metrics.num_output_tokens - told)
    gc.unfreeze()
    stats = engine.metrics.speculation
    return {
        "ms": statistics.median(map(sum, zip(steps[1:], writes[1:], strict=True))),
        "of that writing": statistics.median(writes[1:]),
        "tokens a step": statistics.mean(tokens[1:]),
        "draft tokens a step": len(prompts) * stats.num_draft_tokens / stats.num_steps,
    }


def _written(events: list[Event], requests: dict[str, Request]) -> float:
    """Seconds to turn events into the bytes that go out."""
    start = time.perf_counter()
    for event in events:
        to_response(event, requests[event.request_id], "").SerializeToString()
    return time.perf_counter() - start


# ---- the whole


def measure(options: argparse.Namespace) -> None:
    folder = resolve_model(options.model)
    record: dict[str, Any] = {"model": options.model, "threads": torch.get_num_threads()}
    tables: dict[str, str] = {}
    ops = specserve_kernels.load("auto")
    small, large = options.contexts
    cases = [Case(n, context) for context in (small, large) for n in (1, 4, 16)]
    cases += [Case(1, context, TREE_NODES) for context in (small, large)]
    for name in options.formats:
        model = load(folder, name, ops)
        record[f"step_{name}"], tables[f"One step in {name}, milliseconds"] = step_table(model, cases, options.seconds)
    main = load(folder, "bf16", ops)
    single = load(folder, "bf16", OneCallGemms(ops))  # type: ignore[arg-type]
    record["prefill"], tables["Prefill in bf16"] = prefill_table(main, single, options.prompts, options.seconds)
    torch_ops = specserve_kernels.load("torch")
    models = {ops.name: main, "torch": load(folder, "bf16", torch_ops)}
    models["library"] = load(folder, "bf16", LibraryOps(torch_ops))  # type: ignore[arg-type]
    record["exact"], tables["Exact against library calls, a step in milliseconds"] = exact_table(
        models, options.seconds, small
    )
    record["sampling"], tables["Drawing at 16 rows"] = sampling_table(main, small, options.seconds)
    title = "Host overhead a step at 16 running requests"
    record["host"], tables[title] = host_table(folder, 16, options.tokens)
    write("step", record, tables, describe_environment(EngineConfig(model=options.model), main.decoder), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="+", default=known_formats(), choices=known_formats())
    parser.add_argument("--contexts", nargs=2, type=int, default=[256, 2048], metavar="TOKENS")
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=64, help="answer length of the host overhead's requests")
    parser.add_argument("--seconds", type=float, default=3.0, help="per table row")
    torch.manual_seed(0)
    with torch.inference_mode():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
