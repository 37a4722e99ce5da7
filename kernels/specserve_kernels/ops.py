"""The operations that a forward pass is made of, as one protocol that every backend implements.

A backend is a module (`reference`, `cpu.torch_ops`, `cpu.native`, later `triton`) with these functions. All follow
the exactness rule (docs/exactness.md): the values of a row are a function of that row's inputs alone, never of how many
rows there are or what they hold. Shapes are in brackets; `rows` is the number of new tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

QUANTIZATIONS = ("int8",)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out_features, in_features] and whatever layout its backend made of it.

    One weight has one format and one kernel for all row counts. `raw` stays readable (tied embeddings). A quantized
    weight is `raw` (int8) times `scale`, and was of type `dtype`; specserve_kernels/int8.py defines the format.
    """

    raw: Tensor
    packed: Any = None
    scale: Tensor | None = None  # fp32 [out_features]; None: not quantized
    dtype: torch.dtype | None = None  # of the weight before it was quantized; None: not quantized


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which keys each row sees, in order of position.

    Row r belongs to sequence `sequence[r]`. It sees the first `prefix_len[r]` slots of that sequence in slot
    order, then `tail_slots[r, :tail_len[r]]`: slots of the same sequence in path order, the row's own last. A row of a
    chunk has no tail (`prefix_len` = its position + 1); a tree node sees past and root as prefix, its path as tail.
    Slot s of a sequence lives in page `page_table[sequence, s // page_size]` at offset `s % page_size`.
    """

    sequence: Tensor  # int32 [rows]
    prefix_len: Tensor  # int32 [rows]
    tail_slots: Tensor  # int32 [rows, depth]; depth may be 0; entries past tail_len are arbitrary
    tail_len: Tensor  # int32 [rows]
    page_table: Tensor  # int32 [sequences, pages]; entries past a sequence's last page are arbitrary


class FusedSampler(Protocol):
    """Truncation, noise and argmax of all rows in one call, as specserve/sample.py defines them."""

    def __call__(
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
        """One id per row of processed logits, fp32 [n, vocab] → int64 [n].

        `temperature` fp32 [n] (< 1e-5: argmax), `top_k` int32 [n] (≤ 0: off), `top_p` and `min_p` fp64 [n] (≥ 1 and
        ≤ 0: off), keys int64 [n].
        """
        ...


class LayerWeights(Protocol):
    """One layer with weights packed by one backend; q, k, v are one matrix and so are gate, up."""

    @property
    def attention_norm(self) -> Tensor:
        """[hidden]."""
        ...

    @property
    def qkv(self) -> LinearWeight:
        """[(heads + 2 * kv_heads) * head_dim, hidden]."""
        ...

    @property
    def output(self) -> LinearWeight:
        """[hidden, heads * head_dim]."""
        ...

    @property
    def mlp_norm(self) -> Tensor:
        """[hidden]."""
        ...

    @property
    def gate_up(self) -> LinearWeight:
        """[2 * inner, hidden]."""
        ...

    @property
    def down(self) -> LinearWeight:
        """[hidden, inner]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderModel:
    """A Llama-family decoder in one backend's layout; all tensors of one dtype but the rope table.

    The matrices may be quantized, then all of them are; norms keep the model's dtype.
    """

    embed: LinearWeight  # [vocab, hidden]; need not be packed
    layers: Sequence[LayerWeights]
    norm: Tensor  # [hidden]
    rope_table: Tensor  # fp32 [max_positions, head_dim]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class FusedDecoder(Protocol):
    """A whole forward as one call, bit for bit what the backend's operations give one by one."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: AttentionRows,
        kv: Tensor,
        *,
        num_layers: int | None = None,
        feature_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [rows, hidden], and features [len(feature_layers), rows, hidden].

        `ids`, `positions`, `slots` int64 [rows]; `kv` [layers, 2, pages, kv_heads, page_size, head_dim], written at
        `slots`. `num_layers`: stop after so many. A feature is the hidden state after that layer (0-based, ascending).
        """
        ...


class Ops(Protocol):
    """The operations. Inputs are contiguous CPU (or device) tensors of the model's dtype unless noted."""

    name: str

    def pack_linear(self, weight: Tensor, quantization: str | None = None) -> LinearWeight:
        """Prepare a weight [out, in] once, at load; `quantization` as in QUANTIZATIONS, None: keep it as it is."""
        ...

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """[rows, in] → [rows, out], summed in at least fp32 in one fixed order over `in`; `out_dtype` None = x's.

        With an int8 weight the rows of x are quantized as well and the sums are exact (int8.py).
        """
        ...

    def embed(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """int64 [rows] → [rows, hidden]: rows of the weight, dequantized if need be; it need not be packed."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, hidden]: x / sqrt(mean(x²) + eps) in fp32, rounded to x's dtype, then times weight (as in Llama)."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, rounded to x's dtype; its `rms_norm`), each [rows, hidden]: the bits of the two apart."""
        ...

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Rotate [rows, heads, head_dim] by halves (Llama / HF layout), computed in fp32.

        `positions` int64 [rows]; `table` fp32 [max_positions, head_dim]: cos of the first half, then sin.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] → silu(first half) * second half, [rows, inner], computed in fp32."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store k, v [rows, kv_heads, head_dim] at `slots` int64 [rows] (page * page_size + offset) of one layer.

        Caches are [pages, kv_heads, page_size, head_dim]. No two rows share a slot.
        """
        ...

    def rope_write_kv(
        self, qkv: Tensor, positions: Tensor, table: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """`rope` of queries and keys, `write_kv` of keys and values, the same bits → rotated q [rows, heads, head_dim].

        `qkv` [rows, (heads + 2 * kv_heads) * head_dim] as the fused projection gives it.
        """
        ...

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` → `target` (int64 [n]) in all layers of kv [layers, 2, pages, kv_heads, page_size, dim].

        All sources are read before any target is written; targets are distinct.
        """
        ...

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float) -> Tensor:
        """Softmax attention of q [rows, heads, head_dim] over the visible slots → [rows, heads, head_dim].

        Keys are visited in order of position in splits [k*S, (k+1)*S) of positions, merged in order; S is a constant
        of the backend. Slots that are not visible are skipped, never multiplied by zero: they may hold NaN.
        heads is a multiple of kv_heads (GQA): query head h reads kv head h // (heads // kv_heads).
        """
        ...

    def top_ids(self, logits: Tensor, count: int) -> Tensor:
        """Ids of the `count` largest logits of each row, fp32 [rows, vocab] → int64 [rows, count], best first.

        Only drafters read them: the order among equal logits is the backend's.
        """
        ...

    def noise(self, seed: Tensor, draw_index: Tensor, choice: Tensor, purpose: int, vocab_size: int) -> Tensor:
        """Gumbel noise fp32 [n, vocab_size] for n keys (int64 [n] each; seed's 64 bits are read as unsigned).

        Philox4x32-10, key = seed (low word, high word), counter = (id // 4, draw_index, choice, purpose),
        word id % 4 → u = (w + 0.5) * 2**-32 and G = -log(-log(u)) in fp64, rounded to fp32.
        """
        ...

    @property
    def sample(self) -> FusedSampler | None:
        """Drawing as one call, or None where the caller composes it from `noise`."""
        ...

    @property
    def decoder(self) -> Callable[[DecoderModel], FusedDecoder] | None:
        """Makes the whole forward of a model one call, or None where it is composed of the operations above."""
        ...
