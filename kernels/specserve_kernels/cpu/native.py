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
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.cpu.native_build import NativeUnavailable, build
from specserve_kernels.ops import AttentionRows, LinearWeight

__all__ = ["NativeOps", "NativeUnavailable", "build", "load"]

ISAS = ("plain", "avx512", "amx")
TYPES = {torch.bfloat16: 0, torch.float32: 1}
ANY = -1  # a size that is not checked
REASONS = {
    1: (IndexError, "a token id is outside the vocabulary"),
    2: (IndexError, "a position is outside the rope table"),
    3: (IndexError, "a slot is outside the cache or the page table"),
    4: (IndexError, "a row's sequence is outside the page table"),
    5: (IndexError, "a visible page is outside the cache"),
    6: (ValueError, "a row sees no key, more prefix than its page table holds, or more tail than tail_slots has"),
}
ARENA = 32 << 20  # bytes; packed weights share huge pages: a 135 M model's are up to 2.6 MB each
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("q", "k_cache", "v_cache", "out")),
        *((name, _pointer) for name in ("sequence", "prefix_len", "tail_slots", "tail_len", "page_table")),
        *((name, _size) for name in ("rows", "heads", "kv_heads", "dim", "page_size")),
        *((name, _size) for name in ("depth", "table_stride", "q_stride")),
        ("scale", ctypes.c_float),
        ("type", _int),
    )


SIGNATURES = {
    "spec_select": (_pointer, [ctypes.c_char_p]),
    "spec_name": (ctypes.c_char_p, [_pointer]),
    "spec_huge_pages": (None, [_pointer, _size]),
    "spec_packed_bytes": (_size, [_size, _size, _int]),
    "spec_pack": (None, [_pointer, _pointer, _size, _size, _int, _int]),
    "spec_linear": (None, [_pointer] * 4 + [_size] * 3 + [_int] * 3),
    "spec_embed": (_int, [_pointer] * 4 + [_size] * 3 + [_int]),
    "spec_rms_norm": (None, [_pointer] * 4 + [_size] * 2 + [ctypes.c_float, _int, _int]),
    "spec_rope": (_int, [_pointer] * 5 + [_size] * 4 + [_int, _int]),
    "spec_silu_mul": (None, [_pointer] * 3 + [_size] * 2 + [_int, _int]),
    "spec_write_kv": (_int, [_pointer] * 6 + [_size] * 5 + [_int]),
    "spec_move_kv": (_int, [_pointer] * 3 + [_size] * 6 + [_int]),
    "spec_attention": (_int, [_pointer, ctypes.POINTER(_AttentionArgs), _size, _size, _int]),
    "spec_noise": (None, [_pointer] * 4 + [_size] * 3 + [_pointer, _int]),
}


def _check(name: str, tensor: Tensor, dtype: torch.dtype | None, *shape: int) -> None:
    """Contiguous on the CPU, of `dtype` (None: bf16 or fp32) and `shape` (ANY: any size)."""
    if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be a CPU tensor")
    if (tensor.dtype not in TYPES) if dtype is None else (tensor.dtype != dtype):
        wanted = dtype or "bfloat16 or float32"
        raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")
    actual = tensor.shape
    if len(actual) != len(shape) or any(w not in (ANY, a) for w, a in zip(shape, actual, strict=True)):
        raise ValueError(f"{name} must have shape {[s if s != ANY else '*' for s in shape]}, not {list(actual)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def _raise(reason: int) -> None:
    if reason:
        kind, text = REASONS[reason]
        raise kind(text)


class PackedWeight:
    """Panels of 32 outputs of one weight, in memory that an arena holds."""

    __slots__ = ("data", "in_features", "out_features", "pointer", "type")

    def __init__(self, data: Tensor, weight: Tensor) -> None:
        self.data = data
        self.pointer = data.data_ptr()
        self.out_features, self.in_features = weight.shape
        self.type = TYPES[weight.dtype]


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

    def pack_linear(self, weight: Tensor) -> LinearWeight:
        """Prepare a weight [out, in] once, at load: bf16 in AMX tile order, fp32 with outputs side by side."""
        _check("weight", weight, None, ANY, ANY)
        out_features, in_features = weight.shape
        if not out_features or not in_features:
            raise ValueError("weight must not be empty")
        kind = TYPES[weight.dtype]
        data = self._allocate(self._lib.spec_packed_bytes(out_features, in_features, kind))
        threads = torch.get_num_threads()
        self._lib.spec_pack(weight.data_ptr(), data.data_ptr(), out_features, in_features, kind, threads)
        return LinearWeight(weight, PackedWeight(data, weight))

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """[rows, in] → [rows, out], each output one fp32 sum over `in` in one order; `out_dtype` None = x's."""
        packed = _packed(weight)
        _check("x", x, weight.raw.dtype, ANY, packed.in_features)
        out_dtype = out_dtype or x.dtype
        if out_dtype not in TYPES:
            raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")
        rows = x.shape[0]
        y = torch.empty(rows, packed.out_features, dtype=out_dtype)
        self._lib.spec_linear(self._kernels, 
            x.data_ptr(), packed.pointer, y.data_ptr(), rows, packed.out_features, packed.in_features, packed.type,
            TYPES[out_dtype], torch.get_num_threads(),
        )  # fmt: skip
        return y

    def embed(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """int64 [rows] → [rows, hidden], rows of `weight.raw`. IndexError for an id outside it."""
        table = weight.raw
        _check("ids", ids, torch.int64, ANY)
        _check("weight", table, None, ANY, ANY)
        y = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype)
        _raise(
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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, hidden]: x / sqrt(mean(x²) + eps) in fp32, rounded to x's dtype, then times weight."""
        _check("x", x, None, ANY, ANY)
        _check("weight", weight, x.dtype, x.shape[1])
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

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotate [rows, heads, head_dim] by halves, in fp32; `table` fp32 [max_positions, head_dim]: cos, then sin."""
        _check("x", x, None, ANY, ANY, ANY)
        rows, heads, dim = x.shape
        if dim % 2:
            raise ValueError("head_dim must be even")
        _check("positions", positions, torch.int64, rows)
        _check("table", table, torch.float32, ANY, dim)
        y = torch.empty_like(x)
        pointers = (x.data_ptr(), positions.data_ptr(), table.data_ptr(), y.data_ptr())
        threads = torch.get_num_threads()
        _raise(self._lib.spec_rope(self._kernels, *pointers, rows, heads, dim, table.shape[0], TYPES[x.dtype], threads))
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] → silu(first half) * second half, [rows, inner], in fp32 with one rounding."""
        _check("gate_up", gate_up, None, ANY, ANY)
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
        _check("k", k, None, ANY, ANY, ANY)
        rows, kv_heads, dim = k.shape
        _check("v", v, k.dtype, rows, kv_heads, dim)
        _check("k_cache", k_cache, k.dtype, ANY, kv_heads, ANY, dim)
        _check("v_cache", v_cache, k.dtype, *k_cache.shape)
        _check("slots", slots, torch.int64, rows)
        pages, page_size = k_cache.shape[0], k_cache.shape[2]
        pointers = (k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr())
        _raise(self._lib.spec_write_kv(self._kernels, *pointers, rows, pages, kv_heads, page_size, dim, TYPES[k.dtype]))

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` → `target` (int64 [n]) in all layers of kv [layers, 2, pages, kv_heads, page_size, dim].

        All sources are read before any target is written.
        """
        _check("kv", kv, None, ANY, 2, ANY, ANY, ANY, ANY)
        _check("source", source, torch.int64, ANY)
        _check("target", target, torch.int64, source.shape[0])
        layers, _, pages, kv_heads, page_size, dim = kv.shape
        sizes = (source.shape[0], 2 * layers, pages, kv_heads, page_size, dim)
        pointers = (kv.data_ptr(), source.data_ptr(), target.data_ptr())
        _raise(self._lib.spec_move_kv(*pointers, *sizes, TYPES[kv.dtype]))

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        """Softmax attention of q [rows, heads, head_dim] over the visible slots → [rows, heads, head_dim]."""
        _check("q", q, None, ANY, ANY, ANY)
        num_rows, heads, dim = q.shape
        _check("k_cache", k_cache, q.dtype, ANY, ANY, ANY, dim)
        _check("v_cache", v_cache, q.dtype, *k_cache.shape)
        if heads % k_cache.shape[1]:
            raise ValueError(f"{heads} query heads do not share {k_cache.shape[1]} kv heads evenly")
        out = torch.empty_like(q)
        args = _attention_args(rows, num_rows)
        args.q, args.k_cache, args.v_cache, args.out = (t.data_ptr() for t in (q, k_cache, v_cache, out))
        args.heads, args.kv_heads, args.dim = heads, k_cache.shape[1], dim
        args.page_size, args.q_stride, args.scale, args.type = k_cache.shape[2], heads * dim, scale, TYPES[q.dtype]
        threads = torch.get_num_threads()
        _raise(
            self._lib.spec_attention(
                self._kernels, ctypes.byref(args), rows.page_table.shape[0], k_cache.shape[0], threads
            )
        )
        return out

    def noise(self, seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
        """Gumbel noise fp32 [n, vocab_size] for n keys (int64 [n] each); see Ops.noise."""
        n = _check_keys(seed, draw_index, choice)
        out = torch.empty(n, vocab_size, dtype=torch.float32)
        pointers = (seed.data_ptr(), draw_index.data_ptr(), choice.data_ptr())
        self._lib.spec_noise(self._kernels, *pointers, purpose, n, vocab_size, out.data_ptr(), torch.get_num_threads())
        return out


def _packed(weight: LinearWeight) -> PackedWeight:
    if not isinstance(weight.packed, PackedWeight):
        raise TypeError("the weight was not packed by this backend's pack_linear")
    return weight.packed


def _check_keys(*keys: Tensor) -> int:
    for name, key in zip(("seed", "draw_index", "choice"), keys, strict=True):
        _check(name, key, torch.int64, keys[0].shape[0] if keys[0].dim() else ANY)
    return keys[0].shape[0]


def _attention_args(rows: AttentionRows, num_rows: int) -> _AttentionArgs:
    """The part of the arguments that is the same in all layers; the values are checked on the other side."""
    _check("rows.sequence", rows.sequence, torch.int32, num_rows)
    _check("rows.prefix_len", rows.prefix_len, torch.int32, num_rows)
    _check("rows.tail_slots", rows.tail_slots, torch.int32, num_rows, ANY)
    _check("rows.tail_len", rows.tail_len, torch.int32, num_rows)
    _check("rows.page_table", rows.page_table, torch.int32, ANY, ANY)
    args = _AttentionArgs()
    args.sequence, args.prefix_len = rows.sequence.data_ptr(), rows.prefix_len.data_ptr()
    args.tail_slots, args.tail_len = rows.tail_slots.data_ptr(), rows.tail_len.data_ptr()
    args.page_table, args.rows = rows.page_table.data_ptr(), num_rows
    args.depth, args.table_stride = rows.tail_slots.shape[1], rows.page_table.shape[1]
    return args


_loaded: dict[Path, ctypes.CDLL] = {}


def _library(path: Path) -> ctypes.CDLL:
    if path not in _loaded:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"{path} does not load: {error}") from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        _loaded[path] = library
    return _loaded[path]


def load(cache: Path | None = None) -> NativeOps:
    """The backend for this machine. Raises NativeUnavailable with the reason; ValueError for an unknown ISA limit."""
    limit = os.environ.get("SPECSERVE_NATIVE_ISA") or ISAS[-1]
    if limit not in ISAS:
        raise ValueError(f"SPECSERVE_NATIVE_ISA must be one of {', '.join(ISAS)}, not {limit!r}")
    return NativeOps(_library(build(cache)), limit)


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
