"""The native CPU backend: C++ kernels for AMX, AVX-512 and any other machine, behind the Ops protocol.

`load()` compiles them if need be (native_build.py), picks the best table of kernels for this CPU and returns the
backend, or raises NativeUnavailable with the reason. Inputs are checked here, before a pointer crosses: a wrong one
raises, none can write outside its buffer. Threads: `torch.get_num_threads()` at each call; no value depends on it.
`SPECSERVE_NATIVE_ISA` = plain, avx512 or amx is an upper limit, for tests.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.cpu.native_abi import (
    ANY,
    INT8,
    TYPES,
    PackedWeight,
    attention_args,
    check,
    check_keys,
    open_library,
    packed_weight,
    raise_for,
)
from specserve_kernels.cpu.native_build import NativeUnavailable, build
from specserve_kernels.cpu.native_decoder import NativeDecoder
from specserve_kernels.cpu.torch_ops import split_values
from specserve_kernels.int8 import quantize_weight
from specserve_kernels.ops import AttentionRows, DecoderModel, LinearWeight

__all__ = ["DecoderModel", "NativeDecoder", "NativeOps", "NativeUnavailable", "build", "load"]

ISAS = ("plain", "avx512", "amx")
ARENA = 32 << 20  # bytes; packed weights share huge pages: a 135 M model's are up to 2.6 MB each


class NativeOps:
    """Ops over the C ABI. One per process and instruction set; weights packed by one run on all."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, limit: str) -> None:
        self._lib = library
        self._kernels: int = library.spec_select(limit.encode())
        self.isa: str = library.spec_name(self._kernels).decode()
        self._arena: Tensor | None = None
        self._arena_used = 0

    def _allocate(self, size: int) -> Tensor:
        """`size` bytes at a multiple of 64. Arenas live as long as a weight in them."""
        size = (size + 63) // 64 * 64
        if self._arena is None or self._arena_used + size > self._arena.numel():
            block = torch.empty(max(ARENA, size) + (2 << 20), dtype=torch.uint8)
            self._lib.spec_huge_pages(block.data_ptr(), block.numel())
            self._arena, self._arena_used = block[-block.data_ptr() % (2 << 20) :], 0
        view = self._arena[self._arena_used : self._arena_used + size]
        self._arena_used += size
        return view

    def pack_linear(self, weight: Tensor, quantization: str | None = None) -> LinearWeight:
        """Prepare a weight [out, in] once, at load: bf16 and int8 in AMX tile order, fp32 with outputs side by side."""
        check("weight", weight, None, ANY, ANY)
        out_features, in_features = weight.shape
        if not out_features or not in_features:
            raise ValueError("weight must not be empty")
        if quantization is not None:
            return self._pack_int8(quantize_weight(weight, quantization))
        kind = TYPES[weight.dtype]
        data = self._allocate(self._lib.spec_packed_bytes(out_features, in_features, kind))
        threads = torch.get_num_threads()
        self._lib.spec_pack(weight.data_ptr(), data.data_ptr(), out_features, in_features, kind, threads)
        return LinearWeight(weight, PackedWeight(data, weight))

    def _pack_int8(self, weight: LinearWeight) -> LinearWeight:
        assert weight.scale is not None
        data = self._allocate(self._lib.spec_packed_bytes(*weight.raw.shape, INT8))
        pointers = (weight.raw.data_ptr(), weight.scale.data_ptr(), data.data_ptr())
        self._lib.spec_pack_int8(*pointers, *weight.raw.shape, torch.get_num_threads())
        return replace(weight, packed=PackedWeight(data, weight.raw))

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """[rows, in] → [rows, out], each output one fp32 sum over `in` in one order; `out_dtype` None = x's."""
        packed = packed_weight(weight)
        int8 = packed.type == INT8
        check("x", x, None if int8 else weight.raw.dtype, ANY, packed.in_features)
        out_dtype = out_dtype or x.dtype
        if out_dtype not in TYPES:
            raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")
        rows = x.shape[0]
        y = torch.empty(rows, packed.out_features, dtype=out_dtype)
        call = self._lib.spec_linear_int8 if int8 else self._lib.spec_linear
        call(self._kernels,
            x.data_ptr(), packed.pointer, y.data_ptr(), rows, packed.out_features, packed.in_features, TYPES[x.dtype],
            TYPES[out_dtype], torch.get_num_threads(),
        )  # fmt: skip
        return y

    def embed(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """int64 [rows] → [rows, hidden], rows of the weight. IndexError for an id outside it."""
        if weight.scale is not None:
            return self._embed_int8(ids, weight)
        table = weight.raw
        check("ids", ids, torch.int64, ANY)
        check("weight", table, None, ANY, ANY)
        y = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype)
        raise_for(
            self._lib.spec_embed(
                self._kernels,
                ids.data_ptr(),
                table.data_ptr(),
                y.data_ptr(),
                *y.shape[:1],
                *table.shape,
                TYPES[table.dtype],
            )
        )
        return y

    def _embed_int8(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        check("ids", ids, torch.int64, ANY)
        check("weight", weight.raw, torch.int8, ANY, ANY)
        assert weight.scale is not None and weight.dtype is not None
        check("scale", weight.scale, torch.float32, weight.raw.shape[0])
        y = torch.empty(ids.shape[0], weight.raw.shape[1], dtype=weight.dtype)
        pointers = (ids.data_ptr(), weight.raw.data_ptr(), weight.scale.data_ptr(), y.data_ptr())
        sizes = (ids.shape[0], *weight.raw.shape)
        raise_for(self._lib.spec_embed_int8(self._kernels, *pointers, *sizes, TYPES[y.dtype]))
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, hidden]: x / sqrt(mean(x²) + eps) in fp32, rounded to x's dtype, then times weight."""
        check("x", x, None, ANY, ANY)
        check("weight", weight, x.dtype, x.shape[1])
        y = torch.empty_like(x)
        self._lib.spec_rms_norm(
            self._kernels,
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            *x.shape,
            eps,
            TYPES[x.dtype],
            torch.get_num_threads(),
        )
        return y

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its `rms_norm`), each [rows, hidden]."""
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotate [rows, heads, head_dim] by halves, in fp32; `table` fp32 [max_positions, head_dim]: cos, then sin."""
        check("x", x, None, ANY, ANY, ANY)
        rows, heads, dim = x.shape
        if dim % 2:
            raise ValueError("head_dim must be even")
        check("positions", positions, torch.int64, rows)
        check("table", table, torch.float32, ANY, dim)
        y = torch.empty_like(x)
        pointers = (x.data_ptr(), positions.data_ptr(), table.data_ptr(), y.data_ptr())
        threads = torch.get_num_threads()
        raise_for(
            self._lib.spec_rope(self._kernels, *pointers, rows, heads, dim, table.shape[0], TYPES[x.dtype], threads)
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] → silu(first half) * second half, [rows, inner], in fp32 with one rounding."""
        check("gate_up", gate_up, None, ANY, ANY)
        rows, twice = gate_up.shape
        if twice % 2:
            raise ValueError("gate_up must have an even number of columns")
        y = torch.empty(rows, twice // 2, dtype=gate_up.dtype)
        kind = TYPES[y.dtype]
        self._lib.spec_silu_mul(
            self._kernels, gate_up.data_ptr(), y.data_ptr(), rows, twice // 2, kind, torch.get_num_threads()
        )
        return y

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store k, v [rows, kv_heads, head_dim] at `slots` int64 [rows] of caches [pages, kv_heads, page_size, dim]."""
        check("k", k, None, ANY, ANY, ANY)
        rows, kv_heads, dim = k.shape
        check("v", v, k.dtype, rows, kv_heads, dim)
        check("k_cache", k_cache, k.dtype, ANY, kv_heads, ANY, dim)
        check("v_cache", v_cache, k.dtype, *k_cache.shape)
        check("slots", slots, torch.int64, rows)
        pages, page_size = k_cache.shape[0], k_cache.shape[2]
        pointers = (k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr())
        raise_for(
            self._lib.spec_write_kv(self._kernels, *pointers, rows, pages, kv_heads, page_size, dim, TYPES[k.dtype])
        )

    def rope_write_kv(
        self, qkv: Tensor, positions: Tensor, table: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """`rope` of q and k, `write_kv` of k and v; `qkv` [rows, (heads + 2 * kv_heads) * head_dim] → q rotated."""
        qk, v = split_values(qkv, k_cache)
        q, k = torch.split(self.rope(qk, positions, table), [qk.shape[1] - v.shape[1], v.shape[1]], dim=1)
        self.write_kv(k.contiguous(), v, k_cache, v_cache, slots)
        return q.contiguous()

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` → `target` (int64 [n]) in all layers of kv [layers, 2, pages, kv_heads, page_size, dim].

        All sources are read before any target is written.
        """
        check("kv", kv, None, ANY, 2, ANY, ANY, ANY, ANY)
        check("source", source, torch.int64, ANY)
        check("target", target, torch.int64, source.shape[0])
        layers, _, pages, kv_heads, page_size, dim = kv.shape
        sizes = (source.shape[0], 2 * layers, pages, kv_heads, page_size, dim)
        pointers = (kv.data_ptr(), source.data_ptr(), target.data_ptr())
        raise_for(self._lib.spec_move_kv(*pointers, *sizes, TYPES[kv.dtype]))

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        """Softmax attention of q [rows, heads, head_dim] over the visible slots → [rows, heads, head_dim]."""
        check("q", q, None, ANY, ANY, ANY)
        num_rows, heads, dim = q.shape
        check("k_cache", k_cache, q.dtype, ANY, ANY, ANY, dim)
        check("v_cache", v_cache, q.dtype, *k_cache.shape)
        if heads % k_cache.shape[1]:
            raise ValueError(f"{heads} query heads do not share {k_cache.shape[1]} kv heads evenly")
        out = torch.empty_like(q)
        args = attention_args(rows, num_rows)
        args.q, args.k_cache, args.v_cache, args.out = (t.data_ptr() for t in (q, k_cache, v_cache, out))
        args.heads, args.kv_heads, args.dim = heads, k_cache.shape[1], dim
        args.page_size, args.q_stride, args.scale, args.type = k_cache.shape[2], heads * dim, scale, TYPES[q.dtype]
        threads = torch.get_num_threads()
        raise_for(
            self._lib.spec_attention(
                self._kernels, ctypes.byref(args), rows.page_table.shape[0], k_cache.shape[0], threads
            )
        )
        return out

    def top_ids(self, logits: Tensor, count: int) -> Tensor:
        """Ids of the `count` largest logits of each row, [rows, count], best first."""
        check("logits", logits, torch.float32, ANY, ANY)
        n, vocab = logits.shape
        if not 0 < count <= vocab:
            raise ValueError(f"count must be between 1 and {vocab}, not {count}")
        ids = torch.empty(n, count, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._lib.spec_top_ids(self._kernels, logits.data_ptr(), n, vocab, count, ids.data_ptr(), threads)
        return ids

    def noise(self, seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
        """Gumbel noise fp32 [n, vocab_size] for n keys (int64 [n] each); see Ops.noise."""
        n = check_keys(seed, draw_index, choice)
        out = torch.empty(n, vocab_size, dtype=torch.float32)
        pointers = (seed.data_ptr(), draw_index.data_ptr(), choice.data_ptr())
        self._lib.spec_noise(self._kernels, *pointers, purpose, n, vocab_size, out.data_ptr(), torch.get_num_threads())
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        draw_index: Tensor,
        choice: Tensor,
    ) -> Tensor:
        """One id per row of processed logits, fp32 [n, vocab] → int64 [n], as specserve/sample.py defines the draw.

        `temperature` fp32 [n], `top_k` int32 [n] (≤ 0: off), `top_p` and `min_p` fp64 [n] (≥ 1 and ≤ 0: off; fp64
        because Python's numbers are, and 0.9 in fp32 can end the prefix one id earlier), keys int64 [n].
        """
        check("logits", logits, torch.float32, ANY, ANY)
        n, vocab = logits.shape
        if not 0 < vocab < 1 << 31:
            raise ValueError("logits need between 1 and 2**31 - 1 columns")
        if check_keys(seed, draw_index, choice) != n:
            raise ValueError(f"{n} rows of logits need {n} keys, not {seed.shape[0]}")
        check("temperature", temperature, torch.float32, n)
        check("top_k", top_k, torch.int32, n)
        check("top_p", top_p, torch.float64, n)
        check("min_p", min_p, torch.float64, n)
        ids = torch.empty(n, dtype=torch.int64)
        inputs = (logits, temperature, top_k, top_p, min_p, seed, draw_index, choice)
        pointers = [t.data_ptr() for t in inputs]
        self._lib.spec_sample(self._kernels, *pointers, n, vocab, ids.data_ptr(), torch.get_num_threads())
        return ids

    def decoder(self, model: DecoderModel) -> NativeDecoder:
        """Check a model once and return its whole forward as one call."""
        return NativeDecoder(self._lib, self._kernels, model)


def load(cache: Path | None = None) -> NativeOps:
    """The backend for this machine. Raises NativeUnavailable with the reason; ValueError for an unknown ISA limit."""
    limit = os.environ.get("SPECSERVE_NATIVE_ISA") or ISAS[-1]
    if limit not in ISAS:
        raise ValueError(f"SPECSERVE_NATIVE_ISA must be one of {', '.join(ISAS)}, not {limit!r}")
    return NativeOps(open_library(build(cache)), limit)


def main(arguments: Sequence[str]) -> int:
    """Build ahead of time; prints where and for which instruction set."""
    try:
        backend = load(Path(arguments[0]) if arguments else None)
    except NativeUnavailable as error:
        print(f"native kernels unavailable: {error}", file=sys.stderr)
        return 1
    print(f"native kernels: {build(Path(arguments[0]) if arguments else None)} ({backend.isa})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
