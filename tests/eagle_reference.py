"""An EAGLE head written down once more: dense attention in fp64, every row at once, who sees whom given as a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Tensors = dict[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions.double()[:, None, None] / base ** (torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Reference:
    """Definitions D1 and D2, dense and in fp64: rows see what `visible` says."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, embed: Tensor) -> None:
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.embed = self.tensors.get("embed_tokens.weight", embed.double())
        self.is_eagle1 = "norm.weight" not in tensors

    def fuse(self, features: Tensor) -> Tensor:
        t, features = self.tensors, features.double()
        if self.is_eagle1 or "fc.weight" not in t:
            return features
        if "input_norm.weight" in t:
            features = rms_norm(features, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            norms = [t[name] for name in sorted(t) if name.startswith("fc_norm.")]
            parts = features.chunk(len(norms), dim=1)
            features = torch.cat([rms_norm(part, norm) for part, norm in zip(parts, norms, strict=True)], 1)
        return features @ t["fc.weight"].T

    def run(self, ids: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """All rows at once → (what is fed back, what the output head reads)."""
        t, config = self.tensors, self.config
        embedded = self.embed[ids]
        if self.is_eagle1:
            hidden = torch.cat((embedded, hidden), 1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(1).double())
        for index in range(config["num_hidden_layers"]):
            layer = {n.removeprefix(f"layers.{index}.").removesuffix(".weight"): w for n, w in t.items()}
            if index == 0 and not self.is_eagle1:
                normed = rms_norm(hidden, layer["hidden_norm"])
                x = torch.cat((rms_norm(embedded, layer["input_layernorm"]), normed), 1)
                hidden = normed if config.get("norm_before_residual") else hidden
            else:
                x = rms_norm(hidden, layer["input_layernorm"]) if "input_layernorm" in layer else hidden
            hidden = hidden + self.attend(x, layer, positions, visible)
            x = rms_norm(hidden, layer["post_attention_layernorm"])
            x = silu(x @ layer["mlp.gate_proj"].T) * (x @ layer["mlp.up_proj"].T)
            hidden = hidden + x @ layer["mlp.down_proj"].T
        if self.is_eagle1:
            return hidden, hidden
        normed = rms_norm(hidden, t["norm.weight"])
        return (normed if config.get("norm_output") else hidden), normed

    def attend(self, x: Tensor, layer: Tensors, positions: Tensor, visible: Tensor) -> Tensor:
        count, dim = len(x), self.config["head_dim"]
        q, k, v = ((x @ layer[f"self_attn.{n}_proj"].T).view(count, -1, dim) for n in "qkv")
        if "self_attn.q_norm" in layer:
            q, k = rms_norm(q, layer["self_attn.q_norm"]), rms_norm(k, layer["self_attn.k_norm"])
        base = self.config.get("rope_theta", 10000.0)
        q, k = rotate(q, positions, base), rotate(k, positions, base)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ layer["self_attn.o_proj"].T
