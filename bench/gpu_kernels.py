"""The GPU bench's yardstick, the bandwidth of a copy, and its GEMMs: all matrices of a forward by that yardstick."""

from __future__ import annotations

from functools import partial

import torch
from gpu_frame import Bench, Line
from specserve_kernels import LinearWeight
from specserve_kernels.triton import TritonOps
from torch import Tensor

from specserve.models.decoder import Decoder

PAGE = 16
NUMERICS = {"fast": TritonOps(exact=False), "exact": TritonOps(exact=True)}


def bandwidth(bench: Bench) -> None:
    source = torch.zeros(bench.size.copied, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.device_ms(lambda _: target.copy_(source))
    bench.bandwidth = 2 * bench.size.copied / (ms / 1e3)
    bench.tell(Line("copy", f"{bench.size.copied >> 20} MiB", ms, None, bench.bandwidth / 1e9, "GB/s"))


def matrices(decoder: Decoder) -> list[LinearWeight]:
    """All that a forward reads: the embedding is only looked up, unless it is the head."""
    layers = decoder.weights.layers
    return [w for layer in layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [
        decoder.weights.head
    ]


def weight_bytes(decoder: Decoder) -> int:
    return sum(weight.raw.numel() * weight.raw.element_size() for weight in matrices(decoder))


def gemms(bench: Bench, decoder: Decoder, until: float) -> None:
    """All matrices of a forward, back to back; exact ones beside the library's."""
    for rows in [n for n in (1, 8, 16, 32, 64) if n <= bench.size.nodes[-1]]:
        bench.attempt("GEMMs", f"{rows} rows", until, partial(_products_of, bench, decoder, rows))


def _products_of(bench: Bench, decoder: Decoder, rows: int) -> None:
    weights, num_bytes = matrices(decoder), weight_bytes(decoder)
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
