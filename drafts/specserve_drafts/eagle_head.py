"""The forward of an EAGLE head: rows of (token, hidden state) over the head's own paged past → hidden states, logits.

EAGLE-3 fuses features of the target into a hidden state, sets it beside the token's embedding, each normed, and runs
one Llama layer whose attention reads both; EAGLE-1/2 fuse embedding and hidden state first. Drafting on, a row's hidden
state is the head's own output of the row before. Rows are computed independently of each other, with the target's ops
and rounding, so a chunk, a whole catch-up and a tree give the same bits. Sources: EAGLE (Li et al., 2024), EAGLE-3 (Li
et al., 2025), and the options that later trainers added (eagle_checkpoint.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from specserve_kernels import AttentionRows, LinearWeight
from torch import Tensor

from specserve.models.decoder import Decoder, rope_table
from specserve_drafts.eagle_checkpoint import EMBEDDING, FC, HEAD, INPUT_NORM, NORM, HeadCheckpoint


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer; `embed_norm` and `hidden_norm` make the first one of EAGLE-3, which reads two halves.

    `input_norm` is None there, and in the first layer of EAGLE-1/2, which has none.
    """

    embed_norm: Tensor | None
    hidden_norm: Tensor | None
    input_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearWeight
    output: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


class EagleHead:
    """A head on its target's backend and device, in its dtype, with the target's embedding and head if it has none."""

    def __init__(self, checkpoint: HeadCheckpoint, target: Decoder, quantization: str | None = None) -> None:
        """`quantization`: the format of the head's matrices, "int8" or None: as they come. All else keeps the dtype."""
        self.config = checkpoint.config
        ids, device = checkpoint.target_ids, target.device
        self.target_ids = None if ids is None else ids.to(device)
        self.dtype = target.dtype
        self._ops = target.ops
        body = self.config.body
        self._rope = rope_table(replace(body, max_position_embeddings=target.config.max_position_embeddings)).to(device)
        self._scale = body.head_dim**-0.5
        pack = partial(self._pack, quantization=quantization)
        tensors = {name: t.to(device, self.dtype) for name, t in checkpoint.tensors.items() if t.is_floating_point()}
        self._fc = pack(tensors[FC]) if FC in tensors else None
        self._fc_bias = tensors.get("fc.bias")
        self._feature_norms = [tensors[name] for name in self.config.tensor_shapes() if name.startswith("fc_norm.")]
        self._input_norm = tensors.get(INPUT_NORM)
        self._layers = [_build_layer(f"layers.{i}.", tensors, pack) for i in range(body.num_hidden_layers)]
        self._norm = tensors.get(NORM)
        self._embed = _own_embedding(tensors.get(EMBEDDING), target)
        self._head = self._output_head(tensors.get(HEAD), target, pack)

    def _pack(self, weight: Tensor, quantization: str | None) -> LinearWeight:
        return self._ops.pack_linear(weight.contiguous(), quantization)

    def _output_head(self, own: Tensor | None, target: Decoder, pack: Callable[[Tensor], LinearWeight]) -> LinearWeight:
        """Its own, or else the target's: the very object where the vocabularies are one, rows of it where not."""
        if own is not None:
            return pack(own)
        shared = self._embed if self.config.body.tie_word_embeddings else target.weights.head
        ids = self.target_ids
        if ids is None and shared is target.weights.head:
            return shared
        rows = shared.raw if ids is None else shared.raw[ids]
        if shared.scale is None:
            return pack(rows)
        scale = shared.scale if ids is None else shared.scale[ids]
        return self._ops.pack_linear(rows.float() * scale[:, None], "int8")  # gives back the very integers

    def variant(self, **options: Any) -> EagleHead:
        """The same weights read with other options of `HeadConfig`, those that change no shape."""
        other = copy.copy(self)
        other.config = replace(self.config, **options)
        return other

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Of its layer group: [layers, 2, pages, kv_heads, page_size, head_dim], in `dtype`."""
        return self.config.body.kv_shape(num_pages, page_size)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """What the target kept of rows, [n, features * hidden] or last hidden states → hidden states [n, hidden]."""
        config, ops, eps = self.config, self._ops, self.config.body.rms_norm_eps
        if config.family == "EAGLE-1/2" or self._fc is None:
            return features
        if self._input_norm is not None:
            features = ops.rms_norm(features, self._input_norm, eps)
        elif self._feature_norms:
            parts = torch.split(features, config.target_hidden_size, dim=1)
            norms = zip(parts, self._feature_norms, strict=True)
            features = torch.cat([ops.rms_norm(part.contiguous(), norm, eps) for part, norm in norms], dim=1)
        return ops.linear(features, self._fc)

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, rows: AttentionRows, kv: Tensor
    ) -> Tensor:
        """Run rows, K and V of every row are written → [rows, hidden], for `feedback` and `logits`.

        Args:
            ids: int64 [rows], the target's.
            hidden: [rows, hidden]: fused features of the token before, or `feedback` of the row before.
            positions: int64 [rows], each below the target's `max_position_embeddings`.
            slots: int64 [rows], where each row's K and V are written, page * page_size + offset.
            rows: what each row sees, its own slot last.
            kv: the layer group.
        """
        ops, eps = self._ops, self.config.body.rms_norm_eps
        embedded = ops.embed(ids, self._embed)
        if self.config.family == "EAGLE-1/2":
            assert self._fc is not None
            hidden = ops.linear(torch.cat((embedded, hidden), dim=1), self._fc)
            if self._fc_bias is not None:
                hidden = hidden + self._fc_bias
        for layer, cache in zip(self._layers, kv, strict=True):
            hidden, x = self._enter(layer, embedded, hidden)
            hidden = hidden + self._attend(x, layer, positions, slots, rows, cache)
            x = ops.rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        return hidden

    def feedback(self, outputs: Tensor) -> Tensor:
        """What the next rows read when drafting goes on, [n, hidden] → [n, hidden]."""
        return self._normed(outputs) if self.config.feeds_back_norm else outputs

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        """[n, hidden] → fp32 [n, draft vocabulary]."""
        return self._ops.linear(self._normed(outputs), self._head, out_dtype=torch.float32)

    def _normed(self, outputs: Tensor) -> Tensor:
        if self._norm is None:
            return outputs
        return self._ops.rms_norm(outputs, self._norm, self.config.body.rms_norm_eps)

    def _enter(self, layer: _Layer, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream, what attention reads)."""
        ops, eps = self._ops, self.config.body.rms_norm_eps
        if layer.embed_norm is not None and layer.hidden_norm is not None:
            normed = ops.rms_norm(hidden, layer.hidden_norm, eps)
            x = torch.cat((ops.rms_norm(embedded, layer.embed_norm, eps), normed), dim=1)
            return (normed if self.config.norm_before_residual else hidden), x
        return hidden, hidden if layer.input_norm is None else ops.rms_norm(hidden, layer.input_norm, eps)

    def _attend(
        self, x: Tensor, layer: _Layer, positions: Tensor, slots: Tensor, rows: AttentionRows, cache: Tensor
    ) -> Tensor:
        """As the target's layers do; `cache` is one layer, [2, pages, kv_heads, page_size, head_dim]."""
        ops, body = self._ops, self.config.body
        heads, kv_heads, dim = body.num_attention_heads, body.num_key_value_heads, body.head_dim
        qkv = ops.linear(x, layer.qkv).view(x.shape[0], heads + 2 * kv_heads, dim)
        qk = qkv[:, : heads + kv_heads].contiguous()
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = self._norm_heads(qk, layer.q_norm, layer.k_norm)
        rotated = ops.rope(qk, positions, self._rope)
        q, k = rotated[:, :heads].contiguous(), rotated[:, heads:].contiguous()
        ops.write_kv(k, qkv[:, heads + kv_heads :].contiguous(), cache[0], cache[1], slots)
        attended = ops.attention(q, cache[0], cache[1], rows, self._scale)
        return ops.linear(attended.view(x.shape[0], heads * dim), layer.output)

    def _norm_heads(self, qk: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """RMS norm of each head of [rows, heads + kv_heads, dim], as Qwen3 does before it rotates."""
        heads, dim, eps = self.config.body.num_attention_heads, qk.shape[2], self.config.body.rms_norm_eps
        parts = []
        for part, norm in ((qk[:, :heads], q_norm), (qk[:, heads:], k_norm)):
            flat = part.reshape(-1, dim)
            parts.append(self._ops.rms_norm(flat, norm, eps).view(part.shape))
        return torch.cat(parts, dim=1)


def _own_embedding(own: Tensor | None, target: Decoder) -> LinearWeight:
    """The head's embedding; the target's object where the head has none, or only repeats it."""
    shared = target.weights.embed
    if own is None or (shared.scale is None and torch.equal(own, shared.raw)):
        return shared
    return LinearWeight(raw=own.contiguous())


def _build_layer(prefix: str, tensors: dict[str, Tensor], pack: Callable[[Tensor], LinearWeight]) -> _Layer:
    def take(*names: str) -> Tensor:
        parts = [tensors[f"{prefix}{name}.weight"] for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def optional(name: str) -> Tensor | None:
        return tensors.get(f"{prefix}{name}.weight")

    hidden_norm, input_norm = optional("hidden_norm"), optional("input_layernorm")
    return _Layer(
        embed_norm=None if hidden_norm is None else input_norm,
        hidden_norm=hidden_norm,
        input_norm=input_norm if hidden_norm is None else None,
        q_norm=optional("self_attn.q_norm"),
        k_norm=optional("self_attn.k_norm"),
        qkv=pack(take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        output=pack(take("self_attn.o_proj")),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=pack(take("mlp.gate_proj", "mlp.up_proj")),
        down=pack(take("mlp.down_proj")),
    )
