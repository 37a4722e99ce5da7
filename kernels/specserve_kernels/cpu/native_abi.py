"""What crosses from Python to the C++ kernels: the records and signatures of the C ABI, and the checks before it.

Every function here stands between a caller's tensors and a raw pointer: a wrong dtype, shape, layout or device raises
here; values that index memory (ids, slots, pages) are checked on the other side and come back as a reason.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.cpu.native_build import NativeUnavailable
from specserve_kernels.ops import AttentionRows, LinearWeight

TYPES = {torch.bfloat16: 0, torch.float32: 1}
INT8 = 2  # of weights only
ANY = -1  # a size that is not checked
REASONS = {
    1: (IndexError, "a token id is outside the vocabulary"),
    2: (IndexError, "a position is outside the rope table"),
    3: (IndexError, "a slot is outside the cache or the page table"),
    4: (IndexError, "a row's sequence is outside the page table"),
    5: (IndexError, "a visible page is outside the cache"),
    6: (ValueError, "a row sees no key, more prefix than its page table holds, or more tail than tail_slots has"),
}
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("q", "k_cache", "v_cache", "out")),
        *((name, _pointer) for name in ("sequence", "prefix_len", "tail_slots", "tail_len", "page_table")),
        *((name, _size) for name in ("rows", "heads", "kv_heads", "dim", "page_size")),
        *((name, _size) for name in ("depth", "table_stride", "q_stride")),
        ("scale", ctypes.c_float),
        ("type", _int),
    )


class LayerArgs(ctypes.Structure):
    _fields_ = tuple((name, _pointer) for name in ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down"))


class DecoderArgs(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerArgs)),
        *((name, _pointer) for name in ("embed", "norm", "embed_scale", "rope", "ids", "positions")),
        *((name, _pointer) for name in ("slots", "kv", "out")),
        *((name, _pointer) for name in ("feature_layers", "features")),
        *((name, _size) for name in ("num_layers", "num_features", "hidden", "inner", "vocab")),
        *((name, _size) for name in ("rope_rows", "pages", "sequences")),
        ("eps", ctypes.c_float),
    )


SIGNATURES = {
    "spec_select": (_pointer, [ctypes.c_char_p]),
    "spec_name": (ctypes.c_char_p, [_pointer]),
    "spec_huge_pages": (None, [_pointer, _size]),
    "spec_packed_bytes": (_size, [_size, _size, _int]),
    "spec_pack": (None, [_pointer, _pointer, _size, _size, _int, _int]),
    "spec_linear": (None, [_pointer] * 4 + [_size] * 3 + [_int] * 3),
    "spec_pack_int8": (None, [_pointer] * 3 + [_size] * 2 + [_int]),
    "spec_linear_int8": (None, [_pointer] * 4 + [_size] * 3 + [_int] * 3),
    "spec_quantize": (None, [_pointer] * 4 + [_size] * 2 + [_int]),
    "spec_embed_int8": (_int, [_pointer] * 5 + [_size] * 3 + [_int]),
    "spec_embed": (_int, [_pointer] * 4 + [_size] * 3 + [_int]),
    "spec_rms_norm": (None, [_pointer] * 4 + [_size] * 2 + [ctypes.c_float, _int, _int]),
    "spec_rope": (_int, [_pointer] * 5 + [_size] * 4 + [_int, _int]),
    "spec_silu_mul": (None, [_pointer] * 3 + [_size] * 2 + [_int, _int]),
    "spec_write_kv": (_int, [_pointer] * 6 + [_size] * 5 + [_int]),
    "spec_move_kv": (_int, [_pointer] * 3 + [_size] * 6 + [_int]),
    "spec_attention": (_int, [_pointer, ctypes.POINTER(AttentionArgs), _size, _size, _int]),
    "spec_decoder_forward": (_int, [_pointer, ctypes.POINTER(DecoderArgs), ctypes.POINTER(AttentionArgs), _int]),
    "spec_sample": (None, [_pointer] * 9 + [_size] * 2 + [_pointer, _int]),
    "spec_top_ids": (None, [_pointer] * 2 + [_size] * 3 + [_pointer, _int]),
    "spec_noise": (None, [_pointer] * 4 + [_size] * 3 + [_pointer, _int]),
}


def check(name: str, tensor: Tensor, dtype: torch.dtype | None, *shape: int) -> None:
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


def raise_for(reason: int) -> None:
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
        self.type = INT8 if weight.dtype == torch.int8 else TYPES[weight.dtype]


def packed_weight(weight: LinearWeight) -> PackedWeight:
    if not isinstance(weight.packed, PackedWeight):
        raise TypeError("the weight was not packed by this backend's pack_linear")
    return weight.packed


def check_keys(*keys: Tensor) -> int:
    for name, key in zip(("seed", "draw_index", "choice"), keys, strict=True):
        check(name, key, torch.int64, keys[0].shape[0] if keys[0].dim() else ANY)
    return keys[0].shape[0]


def attention_args(rows: AttentionRows, num_rows: int) -> AttentionArgs:
    """The part of the arguments that is the same in all layers; the values are checked on the other side."""
    check("rows.sequence", rows.sequence, torch.int32, num_rows)
    check("rows.prefix_len", rows.prefix_len, torch.int32, num_rows)
    check("rows.tail_slots", rows.tail_slots, torch.int32, num_rows, ANY)
    check("rows.tail_len", rows.tail_len, torch.int32, num_rows)
    check("rows.page_table", rows.page_table, torch.int32, ANY, ANY)
    args = AttentionArgs()
    args.sequence, args.prefix_len = rows.sequence.data_ptr(), rows.prefix_len.data_ptr()
    args.tail_slots, args.tail_len = rows.tail_slots.data_ptr(), rows.tail_len.data_ptr()
    args.page_table, args.rows = rows.page_table.data_ptr(), num_rows
    args.depth, args.table_stride = rows.tail_slots.shape[1], rows.page_table.shape[1]
    return args


_loaded: dict[Path, ctypes.CDLL] = {}


def open_library(path: Path) -> ctypes.CDLL:
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
