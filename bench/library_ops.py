"""Two stand-ins to measure against: plain library calls throughout, and our operations with one library GEMM a matrix.

`LibraryOps` is what a careful eager forward would call, with no thought to whether rows see each other: it is what
exactness is paid for against. `OneCallGemms` changes nothing but the GEMMs, each of which becomes a single oneDNN call
whatever the number of rows: it is what prefill is held against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from specserve_kernels import AttentionRows, LinearWeight, Ops
from torch import Tensor


class OneCallGemms:
    """The operations of `base`, one by one, with oneDNN's own GEMMs; no fused forward and no fused drawing."""

    name = "one call a GEMM"
    decoder = None
    sample = None

    def __init__(self, base: Ops) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def pack_linear(self, weight: Tensor) -> LinearWeight:
        return LinearWeight(raw=weight, packed=reordered(weight, 512))

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        y = product(x, weight.packed, weight.raw)
        return y if out_dtype is None else y.to(out_dtype)


class LibraryOps(OneCallGemms):
    """One library call an operation, wherever the library has it."""

    name = "library"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        """Gathers pages and calls scaled_dot_product_attention: once where every sequence has one row, else for each
        sequence."""
        if q.shape[0] == rows.page_table.shape[0]:
            return _decode(q, k_cache, v_cache, rows, scale)
        out = torch.empty_like(q)
        for index in range(rows.page_table.shape[0]):
            mine = (rows.sequence == index).nonzero().flatten()
            visible = _visible(rows, mine)
            pages = rows.page_table[index, : -(-visible.shape[1] // k_cache.shape[2])].long()
            k, v = (_gathered(cache, pages[None])[:, :, : visible.shape[1]] for cache in (k_cache, v_cache))
            query = q[mine].transpose(0, 1).unsqueeze(0)
            mask = None if bool(visible.all()) else visible
            attended = F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True)
            out[mine] = attended[0].transpose(0, 1)
        return out


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
    """One row a sequence, no tails: one call for the batch, padded to the longest."""
    longest = int(rows.prefix_len.max())
    pages = rows.page_table[rows.sequence.long(), : -(-longest // k_cache.shape[2])].long()
    k, v = (_gathered(cache, pages)[:, :, :longest] for cache in (k_cache, v_cache))
    hidden = bool((rows.prefix_len < longest).any())
    mask = (torch.arange(longest) < rows.prefix_len[:, None])[:, None, None] if hidden else None
    return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, scale=scale, enable_gqa=True)[:, :, 0]


def _visible(rows: AttentionRows, mine: Tensor) -> Tensor:
    """bool [rows, slots]: which slots of their sequence these rows see."""
    tails = rows.tail_slots[mine].long()
    used = torch.arange(tails.shape[1]) < rows.tail_len[mine][:, None]
    last = max(int(rows.prefix_len[mine].max()), int(tails[used].max()) + 1 if bool(used.any()) else 0)
    visible = torch.arange(last) < rows.prefix_len[mine][:, None]
    row, column = used.nonzero(as_tuple=True)
    visible[row, tails[row, column]] = True
    return visible


def _gathered(cache: Tensor, pages: Tensor) -> Tensor:
    """The slots of pages [sequences, n] as [sequences, kv_heads, slots, head_dim]."""
    kv_heads, dim = cache.shape[1], cache.shape[3]
    return cache[pages].transpose(1, 2).reshape(len(pages), kv_heads, -1, dim)


def reordered(weight: Tensor, rows: int) -> Tensor | None:
    """A weight in oneDNN's layout for about so many rows, None where this torch has no such call."""
    try:
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        product(weight.new_zeros(1, weight.shape[1]), found, weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return found


def product(x: Tensor, packed: Tensor | None, raw: Tensor) -> Tensor:
    """One library call: oneDNN's with the reordered weight, else `F.linear`."""
    if packed is None:
        return F.linear(x, raw)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return found
