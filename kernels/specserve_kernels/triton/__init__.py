"""The GPU backend: Triton kernels behind the Ops protocol, in two numerics.

`exact` keeps the rule of ops.py: a row's values are a function of that row's inputs alone. `fast` keeps it in all
operations but two: its GEMM is the library's, and its attention splits keys by load and shares blocks over a tree.
Nothing here waits for the device, so a whole step can be captured in a CUDA graph; no operation but `move_kv` and
`attention` changes what it launches with anything but shapes. Correctness is shown by Triton's interpreter and by
compiling for the real targets (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve_kernels.cpu import torch_ops
from specserve_kernels.int8 import quantize_weight
from specserve_kernels.ops import AttentionRows, DecoderModel, FusedDecoder, FusedSampler, LinearWeight
from specserve_kernels.triton import gemm, kv, norms, sampling, tree_attention
from specserve_kernels.triton.launch import INTERPRETED
from specserve_kernels.triton.tree_attention import (
    MAX_NODES,
    TiledRows,
    rows_in_tile,
    rows_of_one_launch,
    tile_bounds,
    tiled,
)

__all__ = ["MAX_NODES", "TiledRows", "TritonOps", "rows_in_tile", "rows_of_one_launch", "tile_bounds", "tiled"]


@dataclass(frozen=True, slots=True)
class TritonOps:
    """The operations on one device. `window`: the model's sliding window, 0 for none. int8 weights are always exact."""

    exact: bool = True
    window: int = 0
    name: str = "triton"

    def pack_linear(self, weight: Tensor, quantization: str | None = None) -> LinearWeight:
        """The weight [out, in] as it is, contiguous, or its integers and scales."""
        if quantization is not None:
            packed = quantize_weight(weight.cpu(), quantization)
            assert packed.scale is not None
            return LinearWeight(packed.raw.to(weight.device), scale=packed.scale.to(weight.device), dtype=packed.dtype)
        return LinearWeight(raw=weight.contiguous())

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """[rows, in] → [rows, out]; in fast numerics the library's GEMM, rounded to x's dtype first."""
        if self.exact or weight.scale is not None:
            return gemm.linear(x, weight, out_dtype)
        return F.linear(x, weight.raw).to(out_dtype or x.dtype)

    def embed(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """int64 [rows] → [rows, hidden]."""
        return norms.embed(ids, weight.raw, weight.scale, weight.dtype or weight.raw.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, hidden] → normed rows times weight."""
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta and its `rms_norm` in one launch, each [rows, hidden]."""
        return norms.add_rms_norm(x, delta, weight, eps)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotate [rows, heads, head_dim] by halves."""
        return norms.rope(x, positions, table)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] → [rows, inner]."""
        return norms.silu_mul(gate_up)

    def write_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: Tensor | None = None
    ) -> None:
        """Store k, v [rows, kv_heads, head_dim] at `slots`; `scales` fp32 [2, kv_heads] of an fp8 cache."""
        kv.write_kv(k, v, k_cache, v_cache, slots, scales)

    def rope_write_kv(
        self, qkv: Tensor, positions: Tensor, table: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
        scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotate q, k and store k, v in one launch: `qkv` [rows, all heads * head_dim] → q [rows, heads, head_dim]."""
        return kv.rope_write_kv(qkv, positions, table, k_cache, v_cache, slots, scales)

    def move_kv(self, kv_pool: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` → `target` (int64 [n]) in all layers, reads first."""
        kv.move_kv(kv_pool, source, target)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float,
        scales: Tensor | None = None, max_len: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Softmax attention over the visible slots, [rows, heads, head_dim]; give TiledRows where rows share a past."""
        # Who plans no tiles may have tails anywhere (drafters' nodes lie in scratch): `fast` looks for them in the 64
        # slots after the prefix alone, `exact` gathers them.
        exact = self.exact or not isinstance(rows, TiledRows)
        return tree_attention.attention(
            q, k_cache, v_cache, rows, scale, exact=exact, window=self.window, scales=scales, max_len=max_len
        )

    def top_ids(self, logits: Tensor, count: int) -> Tensor:
        """Ids of the `count` largest logits of each row, best first."""
        return sampling.top_ids(logits, count)

    def noise(self, seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
        """Gumbel noise fp32 [n, vocab_size], where the keys are: what guesses on the host needs it there."""
        if seed.device.type == "cpu" and not INTERPRETED:
            return torch_ops.noise(seed, draw_index, choice, purpose, vocab_size)
        return sampling.noise(seed, draw_index, choice, purpose, vocab_size)

    @property
    def sample(self) -> FusedSampler:
        """Drawing of all rows in one launch."""
        return sampling.sample

    @property
    def decoder(self) -> Callable[[DecoderModel], FusedDecoder] | None:
        """None: a forward is composed of the operations above."""
        return None
