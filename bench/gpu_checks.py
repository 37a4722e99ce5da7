"""The GPU bench's check of every operation against the fp64 reference, which runs on the host over copies.

Operations that only copy, and those on integers, must give the same bits; the others what `ALLOWED` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_attention import tree_rows
from gpu_frame import ALLOWED, Bench, Line, elements, relative
from gpu_kernels import NUMERICS, PAGE
from specserve_kernels import AttentionRows, LinearWeight, reference
from specserve_kernels.int8 import quantize_weight
from specserve_kernels.triton import TritonOps, tiled
from torch import Tensor

from specserve.request import SamplingParams
from specserve.sample import Draw, draw_tokens

HEADS, KV_HEADS, DIM = 4, 2, 32
ROWS, WIDTH, VOCAB = 5, 64, 1003
WINDOW = 64  # the shortest that fast attention over trees takes
CONTEXT = WINDOW + 6  # the window hides some of it, and it ends inside a page
E4M3 = torch.float8_e4m3fn

Copy = Callable[[Tensor], Tensor]
# TritonOps, or the reference's module, which has the same functions; `Copy` brings tensors to where it works.
Call = Callable[[Any, Copy], Tensor]


@dataclass(frozen=True)
class Check:
    """One operation; `allowed` is the largest difference relative to the largest value, None: not one bit."""

    name: str
    call: Call
    allowed: float | None
    fast: bool = False  # whether fast numerics have an implementation of their own


def against_reference(bench: Bench, until: float) -> None:
    """Every operation in small shapes, and those that fast numerics compute otherwise in both."""
    for check in [*_dense_checks(bench), *_cache_checks(bench), *_attention_checks(bench), *_drawing_checks(bench)]:
        for name, numerics in NUMERICS.items():
            if check.fast or name == "exact":
                case = f"{check.name}, {name}"
                bench.attempt("difference", case, until, partial(_compare, bench, check, case, numerics))


def _compare(bench: Bench, check: Check, case: str, numerics: TritonOps) -> None:
    found = check.call(numerics, lambda tensor: tensor.to(bench.device, copy=True))
    wanted = check.call(reference, lambda tensor: tensor.to("cpu", copy=True))
    if check.allowed is None:
        bench.tell(Line("difference", case, unit="elements").checked(elements(found, wanted), 0.0))
    else:
        bench.tell(Line("difference", case, unit="of largest").checked(relative(found, wanted), check.allowed))


def _dense_checks(bench: Bench) -> list[Check]:
    x, delta = (bench.normal(ROWS, WIDTH) for _ in range(2))
    weight, norm = bench.normal(33, WIDTH), bench.normal(WIDTH)
    integers = quantize_weight(weight.cpu(), "int8")
    assert integers.scale is not None
    scale, ids = integers.scale, torch.tensor([32, 0, 0, 7])
    positions, table = torch.arange(ROWS), bench.normal(ROWS, DIM, dtype=torch.float32)

    def linear_int8(ops: Any, on: Copy) -> Tensor:
        product: Tensor = ops.linear(on(x), LinearWeight(on(integers.raw), scale=on(scale), dtype=integers.dtype))
        return product

    def rope(ops: Any, on: Copy) -> Tensor:
        rotated: Tensor = ops.rope(on(x).view(ROWS, -1, DIM), on(positions), on(table))
        return rotated

    return [
        Check("linear", lambda ops, on: ops.linear(on(x), LinearWeight(on(weight))), bench.allowed, fast=True),
        Check("linear of int8", linear_int8, None),
        Check("embed", lambda ops, on: ops.embed(on(ids), LinearWeight(on(weight))), None),
        Check("rms_norm", lambda ops, on: ops.rms_norm(on(x), on(norm), 1e-5), bench.allowed),
        Check(
            "add_rms_norm",
            lambda ops, on: torch.stack(ops.add_rms_norm(on(x), on(delta), on(norm), 1e-5)),
            bench.allowed,
        ),
        Check("silu_mul", lambda ops, on: ops.silu_mul(on(x)), bench.allowed),
        Check("rope", rope, bench.allowed),
    ]


def _cache_checks(bench: Bench) -> list[Check]:
    """What is written and moved; the whole cache is compared, so that nothing else may change."""
    qkv = bench.normal(ROWS, (HEADS + 2 * KV_HEADS) * DIM)
    k, v = (bench.normal(ROWS, KV_HEADS, DIM) for _ in range(2))
    caches = bench.normal(2, 3, KV_HEADS, PAGE, DIM)
    slots, positions = torch.tensor([PAGE - 1, PAGE, 0, 3 * PAGE - 1, 7]), torch.arange(ROWS)
    source, target = torch.tensor([1, 2, 3, 40, 16]), torch.tensor([2, 3, 4, 16, 41])  # some of them in a row
    scales = _scales()
    angles = bench.normal(ROWS, DIM, dtype=torch.float32)
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    quarter_turns = quarters.repeat_interleave(DIM // 2, 1)  # nothing is rounded before fp8 is

    def write_kv(fp8: bool, ops: Any, on: Copy) -> Tensor:
        cache = on(caches.to(E4M3) if fp8 else caches)
        ops.write_kv(on(k), on(v), cache[0], cache[1], on(slots), on(scales) if fp8 else None)
        return cache

    def rope_write_kv(fp8: bool, table: Tensor, ops: Any, on: Copy) -> Tensor:
        """Queries and both caches in one row."""
        cache = on(caches.to(E4M3) if fp8 else caches)
        given = on(qkv), on(positions), on(table), cache[0], cache[1], on(slots)
        q = ops.rope_write_kv(*given, on(scales) if fp8 else None)
        return torch.cat((q.flatten(), cache.to(q.dtype).flatten()))

    def move_kv(ops: Any, on: Copy) -> Tensor:
        pool = on(caches[None])
        ops.move_kv(pool, on(source), on(target))
        return pool

    return [
        Check("write_kv", partial(write_kv, False), None),
        Check("write_kv of fp8", partial(write_kv, True), None),
        Check("rope_write_kv", partial(rope_write_kv, False, angles), bench.allowed),
        Check("rope_write_kv of fp8", partial(rope_write_kv, True, quarter_turns), None),
        Check("move_kv", move_kv, None),
    ]


def _scales() -> Tensor:
    """fp32 [2, kv_heads], each another power of two: dividing by them rounds nothing."""
    return torch.tensor([[0.5, 0.25], [2.0, 0.125]])


def _attention_checks(bench: Bench) -> list[Check]:
    """A tree after some context: plain, over an fp8 cache, and with a sliding window."""
    rows = tree_rows(1, CONTEXT, ROWS, torch.device("cpu"))
    q, caches = bench.normal(ROWS, HEADS, DIM), bench.normal(2, rows.page_table.numel(), KV_HEADS, PAGE, DIM)

    def attend(fp8: bool, window: int, ops: Any, on: Copy) -> Tensor:
        cache = on(caches.to(E4M3) if fp8 else caches)
        there = AttentionRows(*(on(getattr(rows, name)) for name in AttentionRows.__dataclass_fields__))
        plan = tiled(there, [ROWS], HEADS // KV_HEADS, DIM, q.dtype)
        given = on(q), cache[0], cache[1], plan, DIM**-0.5, on(_scales()) if fp8 else None
        if isinstance(ops, TritonOps):
            return replace(ops, window=window).attention(*given)
        return reference.attention(*given, window=window)

    return [
        Check("attention", partial(attend, False, 0), bench.allowed, fast=True),
        Check("attention over fp8", partial(attend, True, 0), bench.allowed, fast=True),
        Check(f"attention, window of {WINDOW}", partial(attend, False, WINDOW), bench.allowed, fast=True),
    ]


def _drawing_checks(bench: Bench) -> list[Check]:
    """Noise, and ids. The reference has no `sample` of its own: specserve composes it from its noise."""
    seeds = torch.arange(ROWS)
    logits = bench.normal(ROWS, VOCAB, scale=3.0, dtype=torch.float32)
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}]
    draws = [
        Draw(row=row, draw_index=row + 7, choice=0, seed=2**63 + row, params=SamplingParams(**way))
        for row, way in enumerate(ways)
    ]
    return [
        Check("noise", lambda ops, on: ops.noise(on(seeds), on(seeds), on(seeds), 0, VOCAB), ALLOWED[torch.float32]),
        Check("sample", lambda ops, on: torch.tensor(draw_tokens(on(logits), draws, ops)), None),
        Check("top_ids", lambda ops, on: ops.top_ids(on(logits), 8), None),
    ]
