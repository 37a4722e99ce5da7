"""The whole forward of a Llama-family decoder as one C call with one parallel region.

It runs the operations of native.py in the order of `models/decoder.py` with the same roundings, so both give the same
bits; what it saves is a hundred small calls a layer. A model is checked once, when it is prepared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from specserve_kernels.cpu.native_abi import (
    ANY,
    INT8,
    TYPES,
    DecoderArgs,
    LayerArgs,
    attention_args,
    check,
    packed_weight,
    raise_for,
)
from specserve_kernels.ops import AttentionRows, DecoderModel


class NativeDecoder:
    """The forward of one model as one C call with one parallel region; bit for bit what the ops give one by one."""

    def __init__(self, library: ctypes.CDLL, kernels: int, model: DecoderModel) -> None:
        self._lib, self._kernels, self.model = library, kernels, model
        self.dtype = model.norm.dtype
        self._check_model()
        fields = [field[0] for field in LayerArgs._fields_]
        self._layers = (LayerArgs * len(model.layers))()
        for layer, args in zip(model.layers, self._layers, strict=True):
            for name in fields:
                value = getattr(layer, name)
                setattr(args, name, value.data_ptr() if isinstance(value, Tensor) else value.packed.pointer)

    def _check_model(self) -> None:
        model = self.model
        embed = model.embed
        if embed.scale is None:
            check("embed", embed.raw, self.dtype, ANY, ANY)
        else:
            check("embed", embed.raw, torch.int8, ANY, ANY)
            check("embed.scale", embed.scale, torch.float32, embed.raw.shape[0])
        kind = TYPES[self.dtype] if embed.scale is None else INT8
        hidden = embed.raw.shape[1]
        if not model.layers or model.kv_heads < 1 or model.heads % model.kv_heads or model.head_dim % 2:
            raise ValueError("a decoder needs layers, heads a multiple of kv_heads, and an even head_dim")
        self.hidden, self.inner = hidden, packed_weight(model.layers[0].down).in_features
        q_size, self.qkv_size = model.heads * model.head_dim, (model.heads + 2 * model.kv_heads) * model.head_dim
        check("norm", model.norm, None, hidden)
        check("rope_table", model.rope_table, torch.float32, ANY, model.head_dim)
        for index, layer in enumerate(model.layers):
            check(f"layers[{index}].attention_norm", layer.attention_norm, self.dtype, hidden)
            check(f"layers[{index}].mlp_norm", layer.mlp_norm, self.dtype, hidden)
            matrices = (
                ("qkv", layer.qkv, self.qkv_size, hidden),
                ("output", layer.output, hidden, q_size),
                ("gate_up", layer.gate_up, 2 * self.inner, hidden),
                ("down", layer.down, hidden, self.inner),
            )
            for name, matrix, rows, columns in matrices:
                packed = packed_weight(matrix)
                found = (packed.out_features, packed.in_features, packed.type)
                if found != (rows, columns, kind):
                    raise ValueError(f"layers[{index}].{name} is {found}, not {(rows, columns, kind)}")

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
        model, count = self.model, ids.shape[0]
        depth = len(model.layers) if num_layers is None else num_layers
        if not 0 < depth <= len(model.layers):
            raise ValueError(f"num_layers must be between 1 and {len(model.layers)}, not {depth}")
        if list(feature_layers) != sorted(set(feature_layers)) or any(not 0 <= f < depth for f in feature_layers):
            raise ValueError(f"feature_layers must ascend within [0, {depth}), not {list(feature_layers)}")
        for name, tensor in (("ids", ids), ("positions", positions), ("slots", slots)):
            check(name, tensor, torch.int64, count)
        check("kv", kv, self.dtype, ANY, 2, ANY, model.kv_heads, ANY, model.head_dim)
        if kv.shape[0] < depth:
            raise ValueError(f"kv has {kv.shape[0]} layers, the forward needs {depth}")
        out = torch.empty(count, self.hidden, dtype=self.dtype)
        features = torch.empty(len(feature_layers), count, self.hidden, dtype=self.dtype)
        wanted = (ctypes.c_int64 * max(1, len(feature_layers)))(*feature_layers)
        args = self._args(ids, positions, slots, kv, out, features)
        args.feature_layers, args.num_features = ctypes.addressof(wanted), len(feature_layers)
        args.num_layers, args.sequences = depth, rows.page_table.shape[0]
        attention = attention_args(rows, count)
        attention.heads, attention.kv_heads, attention.dim = model.heads, model.kv_heads, model.head_dim
        attention.page_size, attention.q_stride = kv.shape[4], self.qkv_size
        attention.scale, attention.type = model.scale, TYPES[self.dtype]
        pointers = (ctypes.byref(args), ctypes.byref(attention))
        raise_for(self._lib.spec_decoder_forward(self._kernels, *pointers, torch.get_num_threads()))
        return out, features

    def _args(
        self, ids: Tensor, positions: Tensor, slots: Tensor, kv: Tensor, out: Tensor, features: Tensor
    ) -> DecoderArgs:
        model = self.model
        return DecoderArgs(
            layers=self._layers,
            embed=model.embed.raw.data_ptr(),
            embed_scale=None if model.embed.scale is None else model.embed.scale.data_ptr(),
            norm=model.norm.data_ptr(),
            rope=model.rope_table.data_ptr(),
            ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            kv=kv.data_ptr(),
            out=out.data_ptr(),
            features=features.data_ptr(),
            hidden=self.hidden,
            inner=self.inner,
            vocab=model.embed.raw.shape[0],
            rope_rows=model.rope_table.shape[0],
            pages=kv.shape[2],
            eps=model.eps,
        )
