"""Every operation in plain fp64, one row, one head, one key at a time: slow, and right at a glance.

The other backends are tested against this one. Results are rounded once, at the end, to the type the protocol names
(`rms_norm` twice: the protocol rounds before the weight). Row exactness holds trivially: loops over rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specserve_kernels.int8 import dequantize_rows, quantize_activations, quantize_weight, rescale
from specserve_kernels.ops import AttentionRows, LinearWeight

E4M3_MAX = 448.0

name = "reference"
sample = None  # composed by the caller
decoder = None


def pack_linear(weight: Tensor, quantization: str | None = None) -> LinearWeight:
    """The weight [out, in] as it is, or its integers and scales."""
    return LinearWeight(raw=weight) if quantization is None else quantize_weight(weight, quantization)


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """[rows, in] → [rows, out]: each output is one dot product, of integers if the weight is quantized."""
    if weight.scale is not None:
        *digits, scales = quantize_activations(x)
        high, low = (torch.stack([(weight.raw.long() * row.long()).sum(1) for row in digit]) for digit in digits)
        return rescale(high, low, scales, weight.scale, out_dtype or x.dtype)
    out = torch.empty(x.shape[0], weight.raw.shape[0], dtype=out_dtype or x.dtype)
    for row in range(x.shape[0]):
        out[row] = (weight.raw.double() * x[row].double()).sum(1)
    return out


def embed(ids: Tensor, weight: LinearWeight) -> Tensor:
    """int64 [rows] → [rows, hidden]."""
    if weight.scale is not None:
        return dequantize_rows(ids, weight)
    return torch.stack([weight.raw[token] for token in ids.tolist()])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, hidden]: x / sqrt(mean(x²) + eps), rounded to x's dtype, times weight."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        wide = x[row].double()
        normed = (wide / torch.sqrt((wide * wide).mean() + eps)).to(x.dtype)
        out[row] = (normed.double() * weight.double()).to(x.dtype)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, rounded to x's dtype; its `rms_norm`)."""
    total = (x.double() + delta.double()).to(x.dtype)
    return total, rms_norm(total, weight, eps)


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[rows, heads, head_dim]: each pair (i, i + head_dim / 2) turned by the angle of its position."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for row, position in enumerate(positions.tolist()):
        cos, sin = table[position, :half].double(), table[position, half:].double()
        first, second = x[row, :, :half].double(), x[row, :, half:].double()
        out[row, :, :half] = first * cos - second * sin
        out[row, :, half:] = second * cos + first * sin
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * inner] → gate / (1 + exp(−gate)) * up, [rows, inner]."""
    inner = gate_up.shape[1] // 2
    gate, up = gate_up[:, :inner].double(), gate_up[:, inner:].double()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """Store row r of k, v [rows, kv_heads, head_dim] at slot `slots[r]`; a row of a slot below zero is not written.

    An fp8 cache holds e4m3(value / scale), limited to ±448; `scales` fp32 [2, kv_heads], of keys and of values.
    """
    page_size = k_cache.shape[2]
    for new, cache, scale in zip((k, v), (k_cache, v_cache), (None, None) if scales is None else scales, strict=True):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // page_size, :, slot % page_size] = new[row] if scale is None else _e4m3(new[row], scale)


def _e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """`rope` of q and k, `write_kv` of k and v; `qkv` [rows, (heads + 2 * kv_heads) * head_dim] → q rotated."""
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    parts = qkv.view(qkv.shape[0], qkv.shape[1] // dim, dim)
    q, k, v = torch.split(parts, [parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    write_kv(rope(k, positions, table), v, k_cache, v_cache, slots, scales)
    return rope(q, positions, table)


def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy slots of kv [layers, 2, pages, kv_heads, page_size, dim] as if all at once."""
    page_size = kv.shape[4]
    before = kv.clone()
    for old, new in zip(source.tolist(), target.tolist(), strict=True):
        kv[:, :, new // page_size, :, new % page_size] = before[:, :, old // page_size, :, old % page_size]


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    scale: float,
    scales: Tensor | None = None,
    max_len: int | None = None,
    window: int = 0,
) -> Tensor:
    """[rows, heads, head_dim]: softmax over exactly the visible slots; no other slot is read.

    `scales` as in `write_kv`. A row sees the last `window` slots of its own (0: all). `max_len`, a promise about
    lengths, changes nothing here. A row that sees nothing gives zeros.
    """
    group = q.shape[1] // k_cache.shape[1]
    page_size = k_cache.shape[2]
    k_scale, v_scale = torch.ones(2, k_cache.shape[1]) if scales is None else scales
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        slots = visible_slots(rows, row)[-window:]
        if not slots:
            continue
        pages = [int(rows.page_table[int(rows.sequence[row]), slot // page_size]) for slot in slots]
        keys = torch.stack([k_cache[page, :, slot % page_size] for page, slot in zip(pages, slots, strict=True)])
        values = torch.stack([v_cache[page, :, slot % page_size] for page, slot in zip(pages, slots, strict=True)])
        for head in range(q.shape[1]):
            of = head // group
            scores = keys[:, of].double() @ q[row, head].double() * float(k_scale[of]) * scale
            out[row, head] = torch.softmax(scores, 0) @ values[:, of].double() * float(v_scale[of])
    return out


def visible_slots(rows: AttentionRows, row: int) -> list[int]:
    """The slots that a row sees, in order of position."""
    tail = rows.tail_slots[row, : int(rows.tail_len[row])].tolist()
    return [*range(int(rows.prefix_len[row])), *tail]


def top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits of each row, [rows, count], best first."""
    return torch.topk(logits, count, dim=1).indices


def noise(seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
    """Gumbel noise fp32 [n, vocab_size], one token id at a time."""
    out = torch.empty(seed.shape[0], vocab_size)
    for row in range(seed.shape[0]):
        key = int(seed[row]) % 2**64
        for block in range(-(-vocab_size // 4)):
            words = philox((block, int(draw_index[row]), int(choice[row]), purpose), (key % 2**32, key >> 32))
            for token, word in enumerate(words[: vocab_size - 4 * block], start=4 * block):
                out[row, token] = -math.log(-math.log((word + 0.5) * 2.0**-32))
    return out


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key (Salmon et al., SC'11)."""
    c0, c1, c2, c3 = (word % 2**32 for word in counter)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3
