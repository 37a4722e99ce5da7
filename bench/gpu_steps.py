"""The GPU bench's whole steps, through the product's runner, and answers, through the product's engine."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from gpu_frame import Bench, Line
from gpu_kernels import PAGE, weight_bytes
from specserve_kernels import Ops
from specserve_kernels.triton import TritonOps

from specserve import batch
from specserve.batch import StepBatch
from specserve.config import EngineConfig, ModelLimits
from specserve.controller import Controller
from specserve.engine import Engine
from specserve.events import Delta
from specserve.gpu_runner import GpuRunner
from specserve.graphs import CudaGraphs, DirectCalls
from specserve.models.decoder import Decoder, DecoderConfig
from specserve.pages import PagePool, PageTable
from specserve.proposal import DraftRow, DraftTree, StepResult
from specserve.request import Request, SamplingParams
from specserve.request import Sequence as Answer
from specserve.scheduler import PlannedRows


def random_decoder(bench: Bench, config: DecoderConfig, numerics: TritonOps) -> Decoder:
    """Matrices of spread 1/sqrt(inputs), norms of one."""
    tensors = {
        name: torch.ones(shape, dtype=bench.dtype, device=bench.device)
        if len(shape) == 1
        else bench.normal(*shape, scale=shape[1] ** -0.5)
        for name, shape in config.tensor_shapes().items()
    }
    return Decoder(config, tensors, cast(Ops, numerics))


def make_runner(bench: Bench, decoder: Decoder, tokens: int) -> GpuRunner:
    """With room for so many tokens; what is cached is random and finite."""
    graphs = CudaGraphs(bench.device) if bench.device.type == "cuda" else DirectCalls()
    pages = -(-tokens // PAGE)
    longest = -(-(bench.size.contexts[-1] + bench.size.nodes[-1]) // PAGE)
    runner = GpuRunner(decoder, pages, PAGE, graphs, max_rows=512, max_pages=max(longest, 1))
    for layer in runner.kv:
        layer.normal_()
    return runner


def planned(sequences: int, context: int, nodes: int, pool: PagePool, vocab_size: int) -> StepBatch:
    """Sequences with their context cached, each with a root and a tree in which a node has two children."""
    tree = DraftTree(
        tuple((7 * n + 3) % vocab_size for n in range(nodes)),
        tuple(n // 2 - 1 for n in range(nodes)),
        ("bench",) * nodes,
    )
    plans = []
    for index in range(sequences):
        pages = PageTable(pool)
        pages.try_reserve(context)
        pages.commit(context)
        pages.try_reserve(1 + nodes)
        ids = [(index + n) % vocab_size for n in range(context + 1)]
        request = Request(request_id=f"bench-{index}", prompt_token_ids=tuple(ids[:-1]))
        answer = Answer(request=request, choice=0, seed=index, arrival=index, token_ids=ids, table=pages)
        plans.append(PlannedRows(sequence=answer, num_pending=1, draws=True, node_cap=nodes, max_depth=nodes))
    return batch.build(plans, [tree] * sequences)


def pool_tokens(bench: Bench, config: DecoderConfig) -> int:
    """Tokens of the largest step that fits the device beside the weights."""
    most = bench.size.batches[-1] * (bench.size.contexts[-1] + bench.size.nodes[-1] + PAGE)
    if bench.device.type != "cuda":
        return most
    free = torch.cuda.mem_get_info(bench.device)[0]
    return int(min(most, 0.6 * free // kv_bytes(bench, config)))


def cases(bench: Bench, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(context, sequences, rows of each) that the pool has room for; the shortest contexts first."""
    for context in bench.size.contexts:
        for sequences in bench.size.batches:
            for rows in bench.size.nodes:
                if sequences * (context + rows + PAGE) <= tokens:
                    yield context, sequences, rows
                else:
                    print(f"step: {sequences} x {context} tokens do not fit the pool of {tokens}", flush=True)


def kv_bytes(bench: Bench, config: DecoderConfig) -> int:
    """Of one token."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bench.dtype.itemsize


def steps(bench: Bench, label: str, runner: GpuRunner, chosen: Sequence[tuple[int, int, int]]) -> None:
    """A whole forward as the engine waits for it, greedy draws included; beside it, the one of one row."""
    config = runner.decoder.config
    plain: dict[tuple[int, int], float] = {}
    for context, sequences, rows in chosen:
        case = f"{label}, {sequences} x {context}, {rows} rows"
        if bench.left < 0.2 * bench.size.seconds:
            bench.tell(Line("step", f"{case}: left out"))
            continue
        step = planned(sequences, context, rows - 1, PagePool(runner.num_pages, PAGE), config.vocab_size)

        def work(step: StepBatch = step) -> None:
            runner.forward(step)

        ms = bench.ms(work)
        beside = plain.setdefault((context, sequences), ms)
        num_bytes = weight_bytes(runner.decoder) + kv_bytes(bench, config) * sequences * context
        how = "launches" if runner.bucket_of(step) is None else "graph"
        bench.tell(Line("step", f"{case} ({how})", ms, beside, bench.share(num_bytes, ms), "% of copy"))


class Letters:
    """A tokenizer that needs no file."""

    def incremental(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        return ""


class Synthetic:
    """Chains whose nodes are right with a given chance each: it knows the answer, and a hash decides."""

    name = "synthetic"
    wants_top_ids = False

    def __init__(self, answer: Sequence[int], num_nodes: int, share: float) -> None:
        self._answer, self._num_nodes, self._share = answer, num_nodes, share

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._chain(len(row.token_ids), min(cap, self._num_nodes)) for row, cap in zip(rows, caps, strict=True)]

    def _chain(self, length: int, count: int) -> DraftTree:
        ids = list(self._answer[length : length + count])
        for place in range(len(ids)):
            if zlib.crc32(f"{length + place}".encode()) / 2**32 >= self._share:
                ids[place] = 1 if ids[place] != 1 else 0
        return DraftTree.chain(ids, self.name)

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


def end_to_end(bench: Bench, name: str, runner: GpuRunner) -> None:
    """The real engine: ms per token of one greedy answer, plain and with drafts that are right so often."""
    prompt = tuple(range(3, 19))
    answer = [*prompt, *_answer(bench, runner, prompt, None)[0]]
    ids, plain = _answer(bench, runner, prompt, None)
    bench.tell(Line("end to end", f"{name}, plain", plain, None, 1.0, "tokens a step"))
    for nodes in (3, 7):
        _answer(bench, runner, prompt, Synthetic(answer, nodes, 0.8))  # captures and compiles what the next ones use
        for share in (0.6, 0.8):
            drafter = Synthetic(answer, nodes, share)
            found, ms = _answer(bench, runner, prompt, drafter)
            same = sum(a == b for a, b in zip(found, ids, strict=True))
            case = f"{name}, {nodes} nodes right {share:.0%} of the time; {same} of {len(ids)} ids as plain"
            bench.tell(Line("end to end", case, ms, plain, plain / ms, "times as fast"))


def _answer(
    bench: Bench, runner: GpuRunner, prompt: tuple[int, ...], drafter: Synthetic | None
) -> tuple[list[int], float]:
    """Ids, and milliseconds per token after the first."""
    tokens = bench.size.tokens
    options = {"drafter": "off" if drafter is None else "ngram", "num_draft_tokens": 64, "page_size": PAGE}
    config = EngineConfig.from_options(model="bench", num_pages=runner.num_pages, **options)
    limits = ModelLimits(
        vocab_size=runner.decoder.config.vocab_size,
        max_model_len=min(runner.num_pages * PAGE, 4096),
        pool_tokens=runner.num_pages * PAGE,
        page_size=PAGE,
        max_num_seqs=4,
        eos_token_ids=(),
        drafters=("off", "ngram"),
    )
    drafters = {} if drafter is None else {"ngram": drafter}
    controller = Controller(config.speculation)
    engine = Engine(config, limits, runner, runner.ops, Letters(), drafters, controller, launch=runner.launch)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Request(request_id="bench", prompt_token_ids=prompt, params=params))
    ids: list[int] = []
    began = 0.0
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Delta):
                began = began or time.perf_counter()
                ids += [token.token_id for token in event.tokens]
    return ids, 1e3 * (time.perf_counter() - began) / max(len(ids) - 1, 1)
