"""The Llama family as a function of its weights: rows of new tokens over a paged past → hidden states → logits.

A forward knows nothing of requests, phases or drafts. A decoded token, a prompt chunk and a draft tree are all
rows with positions, slots and an `AttentionRows` that says what each one sees; K and V are rounded, stored in the
pool and read back from it, also by rows of the same step. The decoder holds weights and no other state.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from specserve_kernels.int8 import quantize_weight
from specserve_kernels.ops import AttentionRows, DecoderModel, FusedDecoder, LinearWeight, Ops
from torch import Tensor

from specserve.errors import ModelError, ModelNotFound

ARCHITECTURE = "LlamaForCausalLM"
FINGERPRINT_STRIDE = 97
# What each number may be, ends included: far beyond any real model, yet small enough that nothing overflows, and
# that a wrong file is refused before memory or minutes are spent on it. fp32 counts positions exactly up to 2**24.
RANGES: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**10),
    "num_attention_heads": (1, 2**13),
    "num_key_value_heads": (1, 2**13),
    "head_dim": (1, 2**14),
    "vocab_size": (1, 2**22),
    "max_position_embeddings": (1, 2**24),
    "original_max_position_embeddings": (1, 2**24),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (1.0, 1e12),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its rotary wavelengths; field names as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a Llama decoder; field names as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int

    @classmethod
    def from_folder(cls, folder: Path) -> DecoderConfig:
        """Read `config.json`.

        Raises:
            ModelNotFound: there is no config.json.
            ModelError: it is not JSON, or describes a model that this decoder does not compute.
        """
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelNotFound(f"{folder} has no config.json; a Hugging Face model folder needs one") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ModelError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Take what the decoder needs of a Hugging Face config; defaults as in transformers' LlamaConfig.

        Raises:
            ModelError: another architecture, an option the decoder does not compute, or a size that makes no sense.
        """
        _refuse_unsupported(raw)
        hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        kv_heads = _size(raw, "num_key_value_heads", heads)
        head_dim = _size(raw, "head_dim", hidden // heads)
        max_positions = _size(raw, "max_position_embeddings", 2048)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even number")
        theta, scaling = _rope(raw, max_positions)
        return cls(
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_hidden_layers=_size(raw, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(raw, "vocab_size"),
            rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            max_position_embeddings=max_positions,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model consists of, by its Hugging Face name; a tied head is not one of them."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def kv_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Shape of the KV tensor: [layers, 2, pages, kv_heads, page_size, head_dim]."""
        return (self.num_hidden_layers, 2, num_pages, self.num_key_value_heads, page_size, self.head_dim)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    found = raw.get("architectures") or ([ARCHITECTURE] if raw.get("model_type") == "llama" else [])
    if found != [ARCHITECTURE]:
        raise ModelError(f"config.json: architectures is {found!r:.80}; supported: [{ARCHITECTURE!r}]")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {raw['hidden_act']!r:.80}; supported: 'silu'")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name) not in (None, False):
            raise ModelError(f"config.json: {name} is {raw[name]!r:.80}; supported: false (no biases)")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"config.json: the weights are quantized ({method!s:.80});"
            " supported: bf16, fp16 and fp32 safetensors, or GGUF"
        )


def _float(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    return float(checked_number(f"config.json: {name}", name, default if value is None else value))


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    return checked_size(f"config.json: {name}", name, default if value is None else value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {name} is {value!r:.80}; it must be true or false")
    return bool(value)


def checked_number(where: str, name: str, value: object) -> int | float:
    """A number in the range of config field `name`; ModelError, which begins with `where`, if it is anything else."""
    if value is None:
        raise ModelError(f"{where} is missing")
    least, most = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ModelError(f"{where} is {value!r:.80}; it must be one number from {least} to {most}")
    return value


def checked_size(where: str, name: str, value: object) -> int:
    """As `checked_number`, for fields that count something."""
    number = checked_number(where, name, value)
    if number != int(number):
        raise ModelError(f"{where} is {number}; it must be a whole number")
    return int(number)


def _rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, Llama3Scaling | None]:
    """transformers 5 writes one `rope_parameters`; older configs `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        raise ModelError(f"config.json: {field} is {rope!r:.80}; it must be a JSON object")
    merged = {"rope_theta": raw.get("rope_theta"), **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"config.json: the rope type is {kind!r:.80}; supported: 'default', 'llama3'")
    partial = merged.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor is {partial!r:.80}; supported: 1.0")
    theta = _float(merged, "rope_theta", 10000.0)
    if kind == "default":
        return theta, None
    scaling = Llama3Scaling(
        factor=_float(rope, "factor"),
        low_freq_factor=_float(rope, "low_freq_factor"),
        high_freq_factor=_float(rope, "high_freq_factor"),
        original_max_position_embeddings=_size(rope, "original_max_position_embeddings", max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(
            f"config.json: high_freq_factor {scaling.high_freq_factor} must be above"
            f" low_freq_factor {scaling.low_freq_factor}"
        )
    return theta, scaling


def llama3_frequencies(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scaled inverse frequencies (fp32 [half]): short wavelengths stay, long ones grow by `factor`.

    Source: transformers' `_compute_llama3_parameters`, in the same order of operations.
    """
    turns = scaling.original_max_position_embeddings / (2 * math.pi / inverse)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """fp32 [head_dim / 2], before scaling; in fp32 step by step as transformers does, so that logits agree."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return torch.as_tensor(1.0 / (config.rope_theta**exponents), dtype=torch.float32)


def rope_table(config: DecoderConfig) -> Tensor:
    """fp32 [max_positions, head_dim]: cos of the first half, then sin."""
    inverse = inverse_frequencies(config)
    if config.rope_scaling is not None:
        inverse = llama3_frequencies(inverse, config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v are one matrix and so are gate, up."""

    attention_norm: Tensor  # [hidden]
    qkv: LinearWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: LinearWeight  # [hidden, heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole model in the layout of one backend."""

    embed: LinearWeight  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: LinearWeight  # [vocab, hidden]; the same object as `embed` when tied

    @classmethod
    def build(
        cls, config: DecoderConfig, tensors: dict[str, Tensor], ops: Ops, quantization: str | None = None
    ) -> DecoderWeights:
        """Fuse and pack tensors named as in `config.tensor_shapes()`, all of one dtype; matrices as `quantization`.

        Empties `tensors` as it goes, so that at most one layer is held twice.
        """
        pack = ops.pack_linear if quantization is None else partial(ops.pack_linear, quantization=quantization)
        embed = tensors.pop("model.embed_tokens.weight")
        tied = config.tie_word_embeddings
        head = pack(embed if tied else tensors.pop("lm_head.weight"))
        layers = tuple(_build_layer(f"model.layers.{i}.", tensors, pack) for i in range(config.num_hidden_layers))
        unpacked = LinearWeight(raw=embed) if quantization is None else quantize_weight(embed, quantization)
        return cls(
            embed=head if tied else unpacked,
            layers=layers,
            norm=tensors.pop("model.norm.weight"),
            head=head,
        )


def _build_layer(prefix: str, tensors: dict[str, Tensor], pack: Callable[[Tensor], LinearWeight]) -> LayerWeights:
    def take(*names: str) -> Tensor:
        parts = [tensors.pop(f"{prefix}{name}.weight") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return LayerWeights(
        attention_norm=take("input_layernorm"),
        qkv=pack(take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        output=pack(take("self_attn.o_proj")),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=pack(take("mlp.gate_proj", "mlp.up_proj")),
        down=pack(take("mlp.down_proj")),
    )


def fingerprint(config: DecoderConfig, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a model: its shape, and in bf16 each norm and every `FINGERPRINT_STRIDE`-th row of each matrix.

    The same model has the same one whatever it is loaded as; a model tuned from it has another.
    """
    sizes = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
    }
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True, separators=(",", ":")).encode())
    for name in config.tensor_shapes():
        rows = tensors[name] if tensors[name].dim() == 1 else tensors[name][::FINGERPRINT_STRIDE]
        digest.update(rows.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


class Decoder:
    """A Llama decoder on one backend. Rows are computed independently of each other (docs/exactness.md)."""

    def __init__(
        self, config: DecoderConfig, tensors: dict[str, Tensor], ops: Ops, quantization: str | None = None
    ) -> None:
        """Build from tensors named as in `config.tensor_shapes()`, all of one dtype; `tensors` is emptied.

        `quantization`: the format of all matrices (specserve_kernels.QUANTIZATIONS); None = as they come. `dtype`
        stays that of norms, residual stream and KV, and all stay on the tensors' device.
        """
        self.config = config
        self.ops = ops
        self.dtype = tensors["model.embed_tokens.weight"].dtype
        self.device = tensors["model.embed_tokens.weight"].device
        self.fingerprint = fingerprint(config, tensors)
        self.weights = DecoderWeights.build(config, tensors, ops, quantization)
        self.rope_table = rope_table(config).to(self.device)
        self.scale = config.head_dim**-0.5
        self._fused = self._fuse()

    def _fuse(self) -> FusedDecoder | None:
        """The whole forward as one call, where the backend has one."""
        if self.ops.decoder is None:
            return None
        model = DecoderModel(
            embed=self.weights.embed,
            layers=self.weights.layers,
            norm=self.weights.norm,
            rope_table=self.rope_table,
            heads=self.config.num_attention_heads,
            kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            eps=self.config.rms_norm_eps,
            scale=self.scale,
        )
        return self.ops.decoder(model)

    def forward(self, ids: Tensor, positions: Tensor, slots: Tensor, rows: AttentionRows, kv: Tensor) -> Tensor:
        """As `run`, through all layers; the hidden states alone."""
        return self.run(ids, positions, slots, rows, kv)[0]

    @torch.inference_mode()
    def run(
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
        """Hidden states after the final norm, [rows, hidden] in the model's dtype; writes K and V of every row.

        Args:
            ids: int64 [rows].
            positions: int64 [rows], each below `max_position_embeddings`.
            slots: int64 [rows], physical (page * page_size + offset), where each row's K and V are written.
            rows: what each row sees; its own slot is the last of it.
            kv: [layers, 2, pages, kv_heads, page_size, head_dim] in the model's dtype.
            num_layers: stop after so many layers, with the final norm; None = all.
            feature_layers: layers (0-based, ascending) whose output is wanted as well.

        Returns:
            (hidden states, features [len(feature_layers), rows, hidden]: the residual stream after those layers).
        """
        if self._fused is not None:
            return self._fused.forward(
                ids, positions, slots, rows, kv, num_layers=num_layers, feature_layers=feature_layers
            )
        layers = self.weights.layers[:num_layers]
        norms = [*(layer.attention_norm for layer in layers), self.weights.norm]
        hidden = self.ops.embed(ids, self.weights.embed)
        x = self.ops.rms_norm(hidden, norms[0], self.config.rms_norm_eps)
        features = []
        for index, (layer, cache) in enumerate(zip(layers, kv, strict=False)):
            attended = self._attend(x, layer, positions, slots, rows, cache)
            hidden, x = self._feed_forward(hidden, attended, layer, norms[index + 1])
            if index in feature_layers:
                features.append(hidden)
        return x, torch.stack(features) if features else hidden.new_empty(0, *hidden.shape)

    def _feed_forward(
        self, hidden: Tensor, attended: Tensor, layer: LayerWeights, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rest of a layer: the residual stream after it, and its norm as the next layer reads it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        hidden, x = ops.add_rms_norm(hidden, attended, layer.mlp_norm, eps)
        inner = ops.silu_mul(ops.linear(x, layer.gate_up))
        return ops.add_rms_norm(hidden, ops.linear(inner, layer.down), next_norm, eps)

    def _attend(
        self, x: Tensor, layer: LayerWeights, positions: Tensor, slots: Tensor, rows: AttentionRows, cache: Tensor
    ) -> Tensor:
        """x [rows, hidden] → [rows, hidden]; `cache` is one layer, [2, pages, kv_heads, page_size, head_dim]."""
        qkv = self.ops.linear(x, layer.qkv)
        q = self.ops.rope_write_kv(qkv, positions, self.rope_table, cache[0], cache[1], slots)
        attended = self.ops.attention(q, cache[0], cache[1], rows, self.scale)
        return self.ops.linear(attended.flatten(1), layer.output)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] as `forward` returned it → fp32 [n, vocab]."""
        return self.ops.linear(hidden, self.weights.head, out_dtype=torch.float32)
