"""The GPU bench's whole steps, through the product's runner, and answers, through the product's engine."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
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
    return int(min(most, 0.6 * bench.free_bytes() / kv_bytes(bench, config)))


def cases(bench: Bench) -> Iterator[tuple[int, int, int]]:
    """(context, sequences, rows of each), the shortest contexts first."""
    return product(bench.size.contexts, bench.size.batches, bench.size.nodes)


def kv_bytes(bench: Bench, config: DecoderConfig) -> int:
    """Of one token."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bench.dtype.itemsize


def steps(bench: Bench, label: str, runner: GpuRunner, chosen: Iterable[tuple[int, int, int]], until: float) -> None:
    """A whole forward as the engine waits for it, greedy draws included; beside it, the one of one row."""
    plain: dict[tuple[int, int], float] = {}
    for context, sequences, rows in chosen:
        case, tokens = f"{label}, {sequences} x {context}, {rows} rows", sequences * (context + rows + PAGE)
        if tokens > runner.num_pages * PAGE:
            bench.tell(Line("step", case, verdict="left out: the device has too little memory"))
            continue
        bench.attempt("step", case, until, partial(_step, bench, case, runner, (context, sequences, rows), plain))


def _step(
    bench: Bench,
    case: str,
    runner: GpuRunner,
    sizes: tuple[int, int, int],
    plain: dict[tuple[int, int], float],
) -> None:
    context, sequences, rows = sizes
    config = runner.decoder.config
    step = planned(sequences, context, rows - 1, PagePool(runner.num_pages, PAGE), config.vocab_size)
    ms = bench.ms(lambda: runner.forward(step))
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
    """Drafts whose nodes are right with a given chance each: it knows the answer, and a hash decides.

    As a tree, each node but the last has a sibling that is wrong, so that what is right must be moved.
    """

    name = "synthetic"
    wants_top_ids = False

    def __init__(self, answer: Sequence[int], num_nodes: int, share: float, *, tree: bool) -> None:
        self.share = share
        self._answer, self._num_nodes, self._tree = answer, num_nodes, tree

    def start(self, view: DraftRow) -> None: ...

    def propose(self, rows: Sequence[DraftRow], caps: Sequence[int]) -> list[DraftTree]:
        return [self._draft(len(row.token_ids), min(cap, self._num_nodes)) for row, cap in zip(rows, caps, strict=True)]

    def _draft(self, length: int, count: int) -> DraftTree:
        depth = (count + 1) // 2 if self._tree else count
        ids = list(self._answer[length : length + depth])
        for place in range(len(ids)):
            if zlib.crc32(f"{length + place}".encode()) / 2**32 >= self.share:
                ids[place] = _other(ids[place])
        return _with_siblings(ids, count, self.name) if self._tree else DraftTree.chain(ids, self.name)

    def observe(self, view: DraftRow, result: StepResult) -> None: ...

    def stop(self, view: DraftRow) -> None: ...


def _other(token_id: int) -> int:
    return 1 if token_id != 1 else 0


def _with_siblings(ids: Sequence[int], count: int, name: str) -> DraftTree:
    """A chain in which every node comes after one that is another id, up to `count` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    for token_id in ids:
        parent = len(tokens) - 1
        if len(tokens) + 2 <= count:
            tokens.append(_other(token_id))
            parents.append(parent)
        tokens.append(token_id)
        parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents), (name,) * len(tokens))


def end_to_end(bench: Bench, label: str, runner: GpuRunner, until: float) -> None:
    """The real engine: ms per token of one greedy answer, plain and with drafts that are right so often.

    In exact numerics every id must be the one that it is without drafts.
    """
    vocab_size = runner.decoder.config.vocab_size
    prompt = tuple((3 + 7 * n) % vocab_size for n in range(bench.size.prompt))
    if bench.size.warming:
        _answer(bench, runner, prompt)  # captures and compiles what the next one uses
    ids, plain = _answer(bench, runner, prompt)
    bench.tell(Line("end to end", f"{label}, plain", plain, None, 1.0, "times as fast"))
    for nodes, tree in bench.size.drafts:
        case = f"{label}, {nodes} nodes in a {'tree' if tree else 'chain'}"
        if bench.may_begin("end to end", case, until):
            _with_drafts(bench, case, runner, prompt, ids, plain, nodes, tree)


def _with_drafts(
    bench: Bench,
    case: str,
    runner: GpuRunner,
    prompt: tuple[int, ...],
    ids: list[int],
    plain: float,
    nodes: int,
    tree: bool,
) -> None:
    drafters = [Synthetic([*prompt, *ids], nodes, share, tree=tree) for share in (0.6, 0.8)]
    if bench.size.warming:
        _answer(bench, runner, prompt, drafters[0])
    for drafter in drafters:
        found, ms = _answer(bench, runner, prompt, drafter)
        right = f"{case}, right {drafter.share:.0%} of the time"
        line = Line("end to end", right, ms, plain, plain / ms, "times as fast")
        others = sum(one != other for one, other in zip(found, ids, strict=True))
        exact = cast(TritonOps, runner.ops).exact
        bench.tell(line.checked(others, 0) if exact else replace(line, difference=others))


def _answer(
    bench: Bench, runner: GpuRunner, prompt: tuple[int, ...], drafter: Synthetic | None = None
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
    if len(ids) != tokens:
        raise RuntimeError(f"the answer ended after {len(ids)} of {tokens} tokens")
    return ids, 1e3 * (time.perf_counter() - began) / (tokens - 1)
