"""The GPU bench's kernels alone: against fp64, against the library's attention, and against copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import specserve_kernels
import torch
import torch.nn.functional as F
from gpu_frame import Bench, Line
from specserve_kernels import AttentionRows, LinearWeight, Ops
from specserve_kernels.triton import TritonOps, tiled
from torch import Tensor

from specserve.models.decoder import Decoder, DecoderConfig

PAGE = 16
NUMERICS = {"fast": TritonOps(exact=False), "exact": TritonOps(exact=True)}


def bandwidth(bench: Bench) -> None:
    source = torch.zeros(bench.size.copied, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.device_ms(lambda _: target.copy_(source))
    bench.bandwidth = 2 * bench.size.copied / (ms / 1e3)
    bench.tell(Line("copy", f"{bench.size.copied >> 20} MiB", ms, None, bench.bandwidth / 1e9, "GB/s"))


def against_reference(bench: Bench) -> None:
    """Largest difference from fp64, relative to the largest value; reference on the host."""
    reference, width = specserve_kernels.load("reference"), 64
    x, weight, norm = bench.normal(5, width), bench.normal(33, width), bench.normal(width)
    positions, angles = torch.arange(5), torch.randn(64, 16)
    cases: dict[str, Callable[[Ops, Callable[[Tensor], Tensor]], Tensor]] = {
        "linear": lambda ops, on: ops.linear(on(x), LinearWeight(on(weight))),
        "rms_norm": lambda ops, on: ops.rms_norm(on(x), on(norm), 1e-5),
        "silu_mul": lambda ops, on: ops.silu_mul(on(x)),
        "rope": lambda ops, on: ops.rope(on(x).view(5, 4, 16), on(positions), on(angles)),
        "noise": lambda ops, on: ops.noise(on(positions), on(positions), on(positions), 0, 1003),
    }
    for name, numerics in NUMERICS.items():
        attended, expected = _attended(bench, numerics, reference)
        bench.tell(Line("difference", f"attention, {name}", value=_difference(attended, expected), unit="of largest"))
        for case, call in cases.items():
            found = call(cast(Ops, numerics), lambda tensor: tensor.to(bench.device))
            wanted = call(reference, lambda tensor: tensor.cpu())
            bench.tell(Line("difference", f"{case}, {name}", value=_difference(found, wanted), unit="of largest"))


def _difference(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())


def _attended(bench: Bench, numerics: TritonOps, reference: Ops) -> tuple[Tensor, Tensor]:
    heads, kv_heads, dim, pages = 4, 2, 32, 6
    q, k, v = bench.normal(3, heads, dim), *(bench.normal(pages, kv_heads, PAGE, dim) for _ in range(2))
    rows = tree_rows(1, 40, 3, bench.device)
    ours = numerics.attention(q, k, v, tiled(rows, [3], heads // kv_heads, dim, q.dtype), dim**-0.5)
    on_host = AttentionRows(*(getattr(rows, name).cpu() for name in AttentionRows.__dataclass_fields__))
    return ours, reference.attention(q.cpu(), k.cpu(), v.cpu(), on_host, dim**-0.5)


def tree_rows(sequences: int, context: int, rows: int, device: torch.device) -> AttentionRows:
    """`rows` of each sequence: a root after `context` tokens, and a chain under it; pages in order."""
    pages = -(-(context + rows) // PAGE)
    tails = [list(range(context + 1, context + 1 + n)) + [0] * (rows - 1 - n) for n in range(rows)] * sequences
    columns = (
        np.repeat(np.arange(sequences), rows),
        np.full(sequences * rows, context + 1),
        np.array(tails).reshape(sequences * rows, rows - 1),
        np.tile(np.arange(rows), sequences),
        np.arange(sequences * pages).reshape(sequences, pages),
    )
    return AttentionRows(*(torch.from_numpy(column.astype(np.int32)).to(device) for column in columns))


def attention(bench: Bench, model: DecoderConfig) -> None:
    """Decode and tree attention of one layer, each over all contexts and batches that there is room and time for."""
    for context in bench.size.contexts:
        for sequences in bench.size.batches:
            for rows in (1, min(8, bench.size.nodes[-1])):
                num_bytes = 2 * sequences * context * model.num_key_value_heads * model.head_dim * bench.dtype.itemsize
                case = f"{sequences} x {context}, {rows} rows"
                if num_bytes > 8 << 30 or bench.left < 0.5 * bench.size.seconds:
                    bench.tell(Line("attention", f"{case}: left out"))
                    continue
                beside, times = attention_case(bench, model, (sequences, context, rows), num_bytes)
                for name, ms in times.items():
                    bench.tell(
                        Line("attention", f"{name}, {case}", ms, beside, bench.share(num_bytes, ms), "% of copy")
                    )


def attention_case(
    bench: Bench, model: DecoderConfig, case: tuple[int, int, int], num_bytes: int
) -> tuple[float, dict[str, float]]:
    """The library's milliseconds and ours; caches take turns, so that none stays in the device's own cache."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    sequences, context, rows = case
    turns = min(bench.size.caches, max(2, (512 << 20) // num_bytes))
    seen = tree_rows(sequences, context, rows, bench.device)
    caches = [bench.normal(2, seen.page_table.numel(), kv_heads, PAGE, dim) for _ in range(turns)]
    plan = tiled(seen, [rows] * sequences, heads // kv_heads, dim, bench.dtype)
    q = bench.normal(sequences * rows, heads, dim)

    def ours(ops: TritonOps) -> float:
        return bench.device_ms(lambda n: ops.attention(q, *caches[n % turns], plan, dim**-0.5), turns)

    times = {name: ours(ops) for name, ops in NUMERICS.items()}
    return library_attention(bench, q, caches, seen, context), times


def library_attention(bench: Bench, q: Tensor, caches: list[Tensor], rows: AttentionRows, context: int) -> float:
    """scaled_dot_product_attention over the same keys, gathered beforehand; a chain of rows needs its mask."""
    sequences = rows.page_table.shape[0]
    count = q.shape[0] // sequences
    pages = rows.page_table.long()
    gathered = [  # [2, sequences, kv_heads, slots, dim]
        cache[:, pages].transpose(2, 3).flatten(3, 4)[:, :, :, : context + count].contiguous() for cache in caches
    ]
    query = q.view(sequences, count, *q.shape[1:]).transpose(1, 2).contiguous()
    visible = torch.ones(count, context + count, dtype=torch.bool, device=bench.device).tril(context)
    mask = None if count == 1 else visible

    def call(turn: int) -> Tensor:
        k, v = gathered[turn % len(gathered)]
        return F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)

    return bench.device_ms(call, len(gathered))


def flex_attention(bench: Bench, model: DecoderConfig) -> None:
    """One tree under torch's compiled FlexAttention, where that can be compiled within the time."""
    if bench.device.type != "cuda" or bench.left < 0.6 * bench.size.seconds:
        bench.tell(Line("attention", "FlexAttention: left out"))
        return
    heads, kv_heads, dim, rows, context = model.num_attention_heads, model.num_key_value_heads, model.head_dim, 8, 8192
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, (k, v) = bench.normal(1, heads, rows, dim), bench.normal(2, 1, kv_heads, context + rows, dim)
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + context, None, None, rows, context + rows, device=str(bench.device)
        )
        compiled = torch.compile(flex_attention)

        def attend(_: int) -> object:
            return compiled(q, k, v, block_mask=mask, enable_gqa=True)

        with bench.compiling():
            attend(0)
        ms = bench.device_ms(attend)
        bench.tell(Line("attention", f"FlexAttention, 1 x {context}, {rows} rows", ms))
    except Exception as error:
        bench.tell(Line("attention", f"FlexAttention: {type(error).__name__}: {error!s:.80}"))


def matrices(decoder: Decoder) -> list[LinearWeight]:
    """All that a forward reads: the embedding is only looked up, unless it is the head."""
    layers = decoder.weights.layers
    return [w for layer in layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [
        decoder.weights.head
    ]


def weight_bytes(decoder: Decoder) -> int:
    return sum(weight.raw.numel() * weight.raw.element_size() for weight in matrices(decoder))


def gemms(bench: Bench, decoder: Decoder) -> None:
    """All matrices of a forward, back to back; exact ones beside the library's."""
    weights, num_bytes = matrices(decoder), weight_bytes(decoder)
    for rows in [n for n in (1, 8, 16, 32, 64) if n <= bench.size.nodes[-1]]:
        inputs = {width: bench.normal(rows, width) for width in {weight.raw.shape[1] for weight in weights}}
        times = {name: _all_products(bench, ops, weights, inputs) for name, ops in NUMERICS.items()}
        for name, ms in times.items():
            share = bench.share(num_bytes, ms)
            bench.tell(Line("GEMMs", f"{name}, {rows} rows", ms, times["fast"], share, "% of copy"))


def _all_products(bench: Bench, ops: TritonOps, weights: list[LinearWeight], inputs: dict[int, Tensor]) -> float:
    def work(_: int) -> None:
        for weight in weights:
            ops.linear(inputs[weight.raw.shape[1]], weight)

    return bench.device_ms(work)
