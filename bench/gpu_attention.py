"""The GPU bench's attention: ours beside torch's two, over the same queries, keys, values and visible sets.

Ours reads pages, torch's the same slots gathered beforehand. All results are held against our exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from gpu_frame import SEED, Bench, Line, relative, said
from gpu_kernels import NUMERICS, PAGE
from specserve_kernels import AttentionRows
from specserve_kernels.triton import TiledRows, TritonOps, tiled
from torch import Tensor

from specserve.models.decoder import DecoderConfig

Call = Callable[[int], Tensor]  # the number of the call, which says whose turn it is among the caches
FLEX_COMPILING = 0.5  # of what compilers may take; the rest is our own kernels'


@dataclass(frozen=True)
class Problem:
    """One layer's attention. Several caches take turns, so that none of them stays in the device's own cache."""

    name: str
    num_bytes: int  # that one call must read
    q: Tensor  # [sequences * rows, heads, dim]
    caches: list[Tensor]  # of [2, pages, kv_heads, PAGE, dim]
    rows: TiledRows
    query: Tensor  # the same as torch has it, [sequences, heads, rows, dim]
    dense: list[Tensor]  # of [2, sequences, kv_heads, context + rows, dim]
    tree: Tensor  # bool [rows, rows]: which of its sequence's rows each row sees


def paths(rows: int) -> list[list[int]]:
    """Of a root, row 0, and a tree in which a node has two children: the nodes that each row sees, its own last."""
    found: list[list[int]] = [[]]
    for row in range(1, rows):
        found.append([*found[(row - 1) // 2], row])
    return found


def tree_rows(sequences: int, context: int, rows: int, device: torch.device) -> AttentionRows:
    """`rows` of each sequence: a root after `context` tokens, and the tree under it; pages in no order."""
    pages = -(-(context + rows) // PAGE)
    tails = paths(rows)
    depth = max(map(len, tails))
    slots = [[context + node for node in tail] + [0] * (depth - len(tail)) for tail in tails]
    shuffled = np.random.default_rng(SEED).permutation(sequences * pages)
    columns = (
        np.repeat(np.arange(sequences), rows),
        np.full(sequences * rows, context + 1),
        np.array(slots * sequences).reshape(sequences * rows, depth),
        np.array([len(tail) for tail in tails] * sequences),
        shuffled.reshape(sequences, pages),
    )
    return AttentionRows(*(torch.from_numpy(column.astype(np.int32)).to(device) for column in columns))


def attention(bench: Bench, model: DecoderConfig, until: float) -> None:
    """Decode and tree attention of one layer, each over all contexts and batches that there is room and time for."""
    for context, sequences, rows in product(bench.size.contexts, bench.size.batches, (1, min(8, bench.size.nodes[-1]))):
        case = f"{sequences} x {context}, {rows} rows"
        work = partial(_one_case, bench, model, case, (sequences, context, rows), until)
        bench.attempt("attention", case, until, work)


def _one_case(bench: Bench, model: DecoderConfig, case: str, sizes: tuple[int, int, int], until: float) -> None:
    problem = _problem(bench, model, case, sizes)
    if problem is None:
        bench.tell(Line("attention", case, verdict="left out: the device has too little memory"))
        return
    expected = _ours(problem, NUMERICS["exact"], 0)
    beside = _library(bench, problem, "SDPA", lambda: _sdpa(problem), expected)
    for name, ops in NUMERICS.items():
        call = partial(_ours, problem, ops)
        line = _timed(bench, problem, name, call, beside)
        bench.tell(line if name == "exact" else line.checked(relative(call(0), expected), bench.allowed))
    if bench.may_begin("attention", f"FlexAttention, {case}", until, FLEX_COMPILING):
        _library(bench, problem, "FlexAttention", lambda: _flex(bench, problem), expected)


def _problem(bench: Bench, model: DecoderConfig, name: str, sizes: tuple[int, int, int]) -> Problem | None:
    """Random, or None if it does not fit: caches, the same gathered, and what gathering takes meanwhile."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    sequences, context, rows = sizes
    num_bytes = 2 * sequences * context * kv_heads * dim * bench.dtype.itemsize
    turns = min(bench.size.caches, max(2, (512 << 20) // num_bytes))
    if (2 * turns + 4) * num_bytes > bench.free_bytes():
        return None
    seen = tree_rows(sequences, context, rows, bench.device)
    caches = [bench.normal(2, seen.page_table.numel(), kv_heads, PAGE, dim) for _ in range(turns)]
    q, pages = bench.normal(sequences * rows, heads, dim), seen.page_table.long()
    tree = torch.zeros(rows, rows, dtype=torch.bool, device=bench.device)
    for row, path in enumerate(paths(rows)):
        tree[row, [0, *path]] = True
    return Problem(
        name=name,
        num_bytes=num_bytes,
        q=q,
        caches=caches,
        rows=tiled(seen, [rows] * sequences, heads // kv_heads, dim, bench.dtype),
        query=q.view(sequences, rows, heads, dim).transpose(1, 2).contiguous(),
        dense=[
            cache[:, pages].transpose(2, 3).flatten(3, 4)[..., : context + rows, :].contiguous() for cache in caches
        ],
        tree=tree,
    )


def _ours(problem: Problem, ops: TritonOps, turn: int) -> Tensor:
    caches, scale = problem.caches[turn % len(problem.caches)], problem.q.shape[-1] ** -0.5
    return ops.attention(problem.q, caches[0], caches[1], problem.rows, scale)


def _timed(bench: Bench, problem: Problem, name: str, call: Call, beside: float | None) -> Line:
    ms = bench.device_ms(call, len(problem.caches))
    return Line("attention", f"{name}, {problem.name}", ms, beside, bench.share(problem.num_bytes, ms), "% of copy")


def _library(bench: Bench, problem: Problem, name: str, make: Callable[[], Call], expected: Tensor) -> float | None:
    """Its milliseconds, and its result beside ours; what the library cannot do is no failure of ours."""
    try:
        call = make()
        found = call(0).transpose(1, 2).reshape(expected.shape)
        line = _timed(bench, problem, name, call, None)
    except Exception as error:
        bench.tell(Line("attention", f"{name}, {problem.name}", verdict=f"left out: {said(error)}"))
        return None
    bench.tell(line.checked(relative(found, expected), bench.allowed))
    return line.ms


def _sdpa(problem: Problem) -> Call:
    """scaled_dot_product_attention; one row of each sequence needs no mask."""
    rows, slots = problem.tree.shape[0], problem.dense[0].shape[3]
    mask = None if rows == 1 else F.pad(problem.tree, (slots - rows, 0), value=True)

    def call(turn: int) -> Tensor:
        k, v = problem.dense[turn % len(problem.dense)]
        return F.scaled_dot_product_attention(problem.query, k, v, mask, enable_gqa=True)

    return call


def _flex(bench: Bench, problem: Problem) -> Call:
    """FlexAttention, compiled for these shapes alone: only then does it take its kernel for few rows."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tree, slots = problem.tree, problem.dense[0].shape[3]
    rows, past = tree.shape[0], slots - tree.shape[0]

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        return (slot < past) | tree[row, (slot - past).clamp(0, rows - 1)]

    mask = None if rows == 1 else create_block_mask(sees, None, None, rows, slots, device=str(bench.device))
    compiled = torch.compile(flex_attention, dynamic=False) if bench.device.type == "cuda" else flex_attention

    def call(turn: int) -> Tensor:
        k, v = problem.dense[turn % len(problem.dense)]
        attended = compiled(problem.query, k, v, block_mask=mask, enable_gqa=True)
        assert isinstance(attended, Tensor)
        return attended

    with bench.compiling():
        torch.compiler.reset()  # after eight shapes it would no longer compile
        call(0)
    return call
