"""EAGLE heads as files: every public layout becomes one frozen record of what the head computes and its tensors.

Layouts: the official one (flat Llama config, `midlayer.*`; SpecForge, ModelOpt and others write it too), speculators
(`transformer_layer_config`, `layers.0.*`) and EAGLE-1/2 (`fc.weight` [H, 2H]). Block drafters, MTP layers and parallel
heads are told apart and refused. Nothing is guessed: a tensor that the configuration does not ask for is an error, as
is one that is missing, has another shape or type, or holds a value that is not finite. What no file can tell
(`norm_output` means two things in the wild) is found by the check that runs when a head is loaded (eagle_check.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specserve.errors import ModelError, ModelNotFound, WeightsError
from specserve.models.decoder import ARCHITECTURE, DecoderConfig
from specserve.models.weights import FILE_DTYPES, StoredTensor, read_headers, read_tensors

PICKLE = "pytorch_model.bin"
PROVENANCE = "provenance.json"
SUPPORTED = "supported: EAGLE-1/2 and EAGLE-3 heads in the official, SpecForge and speculators layouts"
FC, HEAD, EMBEDDING, NORM, D2T, T2D = "fc.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight", "d2t", "t2d"
INPUT_NORM = "input_norm.weight"
BIN_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}

# What speculators' `speculators_model_type` names besides eagle3.
SPECULATORS_KINDS = {
    "peagle": "P-EAGLE head (parallel drafting)",
    "dflash": "DFlash block drafter",
    "dspark": "DSpark block drafter",
    "mtp": "multi-token-prediction (MTP) layer",
    "eagle": "speculators EAGLE-1 or HASS head",
    "mlp": "MLP speculator",
}
# Tensors that only another kind has.
KINDS_BY_TENSOR = (
    (re.compile(r"mask_hidden$"), "P-EAGLE head (parallel drafting)"),
    (re.compile(r"markov_head\.|confidence_head\."), "DSpark block drafter"),
    (re.compile(r"^mtp\.|\.eh_proj\.|\.enorm\.|\.shared_head\."), "multi-token-prediction (MTP) layer"),
)

Family = Literal["EAGLE-1/2", "EAGLE-3"]
FeatureNorm = Literal["none", "whole", "each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head computes, whichever file said it.

    `body` are its own decoder layers; `body.vocab_size` is the target's. `feature_layers`: the target's layers
    (0-based, ascending) whose *outputs* it fuses; () = the last hidden state, as EAGLE-1/2 do. `feature_norm`: one RMS
    norm over all features or one for each. `norm_before_residual`: the residual stream starts from the normed hidden
    state. `feeds_back_norm`: drafting on, it reads its own output after the final norm, not before it. `qk_norm`:
    queries and keys have RMS norms, as in Qwen3.
    """

    family: Family
    body: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] = ()
    fuses: bool = True
    fc_bias: bool = False
    feature_norm: FeatureNorm = "none"
    norm_before_residual: bool = False
    feeds_back_norm: bool = False
    qk_norm: bool = False

    @property
    def num_features(self) -> int:
        return max(1, len(self.feature_layers))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that such a head must have, by its speculators name, without those it may share."""
        hidden, width = self.body.hidden_size, self.num_features * self.target_hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.family == "EAGLE-1/2":
            shapes[FC] = (hidden, 2 * hidden)
        elif self.fuses:
            shapes[FC] = (hidden, width)
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if self.feature_norm == "whole":
            shapes[INPUT_NORM] = (width,)
        if self.feature_norm == "each":
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(self.num_features)}
        for index in range(self.body.num_hidden_layers):
            shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in self._layer_shapes(index).items()}
        if self.family == "EAGLE-3":
            shapes[NORM] = (hidden,)
        return shapes

    def _layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        body, hidden = self.body, self.body.hidden_size
        first_of_three = self.family == "EAGLE-3" and index == 0
        width = 2 * hidden if first_of_three else hidden
        q_size, kv_size = body.num_attention_heads * body.head_dim, body.num_key_value_heads * body.head_dim
        shapes = {
            "self_attn.q_proj": (q_size, width),
            "self_attn.k_proj": (kv_size, width),
            "self_attn.v_proj": (kv_size, width),
            "self_attn.o_proj": (hidden, q_size),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (body.intermediate_size, hidden),
            "mlp.up_proj": (body.intermediate_size, hidden),
            "mlp.down_proj": (hidden, body.intermediate_size),
        }
        norms = ["hidden_norm"] if first_of_three else []
        norms += ["input_layernorm"] if index or first_of_three else []
        norms_of_heads = ["self_attn.q_norm", "self_attn.k_norm"] if self.qk_norm else []
        return shapes | dict.fromkeys(norms, (hidden,)) | dict.fromkeys(norms_of_heads, (body.head_dim,))

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a file may leave out: the target's are used, or there is nothing to map."""
        hidden, vocab = self.body.hidden_size, self.body.vocab_size
        return {
            EMBEDDING: (vocab, hidden),
            HEAD: (self.draft_vocab_size, hidden),
            D2T: (self.draft_vocab_size,),
            T2D: (vocab,),
        }


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """A head as read: `tensors` by speculators name, in the types of the file.

    `target_ids` int64 [draft vocab]: the target's id of each draft id; None = they are the same. `fingerprint`: of the
    target that it was trained for, None where nobody wrote it down.
    """

    folder: Path
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    target_ids: Tensor | None
    fingerprint: str | None


def read_fingerprint(folder: Path) -> str | None:
    """The fingerprint of its target that a head's provenance gives, None without one.

    Raises:
        ModelError: there is a provenance and it cannot be read.
    """
    path = folder / PROVENANCE
    if not path.is_file():
        return None
    found = _read_json(path).get("target_fingerprint")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{path}: target_fingerprint is {found!r:.80}; it must be a string")
    return found


def load_checkpoint(folder: Path, target: DecoderConfig) -> HeadCheckpoint:
    """Read a head for a target of this shape.

    Raises:
        ModelNotFound: there is no config.json.
        ModelError: another kind of drafter, an option that is not computed here, or a head for another shape.
        WeightsError: the tensors are not those of the configuration; names tensor, found and expected.
    """
    config, source, names = _inspect(folder, target)
    tensors = _read(folder, config, source, names)
    return HeadCheckpoint(folder, config, tensors, _target_ids(folder, config, tensors), read_fingerprint(folder))


def read_shapes(folder: Path, target: DecoderConfig) -> tuple[HeadConfig, dict[str, tuple[int, ...]]]:
    """What a head for a target of this shape computes, and the shapes of its tensors by speculators name.

    From headers alone, unless the tensors lie in a pickle. Raises as `load_checkpoint`.
    """
    config, source, names = _inspect(folder, target)
    return config, {name: source.headers[stored].shape for name, stored in names.items()}


def _inspect(folder: Path, target: DecoderConfig) -> tuple[HeadConfig, _Source, dict[str, str]]:
    """The configuration, where the tensors are, and their stored names."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no config.json; the folder of an EAGLE head needs one")
    raw = _read_json(path)
    _refuse(folder, _kind_by_config(raw))
    source = _open(folder)
    names = _canonical(folder, source)
    _refuse(folder, next((kind for name in names for known, kind in KINDS_BY_TENSOR if known.search(name)), None))
    config = _read_config(folder, raw, {name: source.headers[stored].shape for name, stored in names.items()}, target)
    return config, source, names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
    return raw


def _refuse(folder: Path, kind: str | None) -> None:
    if kind is not None:
        raise ModelError(f"{folder} holds a {kind}; {SUPPORTED}")


# ---- configuration


def _kind_by_config(raw: Mapping[str, Any]) -> str | None:
    """Which other kind of drafter this configuration describes, None if it may be an EAGLE head."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return None if kind == "eagle3" else SPECULATORS_KINDS.get(str(kind), f"speculators model of type {kind!r:.40}")
    names = str(raw.get("architectures"))
    if "dspark" in names.lower() or "markov_rank" in raw:
        return SPECULATORS_KINDS["dspark"]
    if "dflash" in names.lower() or "dflash_config" in raw or "block_size" in raw:
        return SPECULATORS_KINDS["dflash"]
    if "mtp" in names.lower() or raw.get("num_nextn_predict_layers"):
        return SPECULATORS_KINDS["mtp"]
    return None


def _read_config(
    folder: Path, raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: DecoderConfig
) -> HeadConfig:
    """What the head computes. The family of a flat config is read off its tensors: only EAGLE-3 has a hidden norm."""
    nested = raw.get("speculators_model_type") is not None
    inner = raw.get("transformer_layer_config") if nested else raw
    if not isinstance(inner, dict):
        raise ModelError(f"{folder}: config.json: transformer_layer_config is {inner!r:.80}; it must be a JSON object")
    body, qk_norm = _body(folder, inner, nested)
    if body.vocab_size != target.vocab_size:
        raise ModelError(f"{folder}: config.json: vocab_size is {body.vocab_size}; the target has {target.vocab_size}")
    options = _eagle_options(folder, raw)
    width = _count(folder, options, "target_hidden_size", body.hidden_size)
    if width != target.hidden_size:
        raise ModelError(
            f"{folder}: config.json: the head reads hidden states of {width} values; the target's have"
            f" {target.hidden_size}"
        )
    if nested or "layers.0.hidden_norm.weight" in shapes or "draft_vocab_size" in raw:
        return _eagle3(folder, options, body, qk_norm, target)
    bias = "fc.bias" in shapes
    wanted = raw.get("bias")
    if wanted is not None and wanted != bias:
        raise WeightsError(f"{folder}: tensor fc.bias is {'' if bias else 'not '}there; config.json: bias is {wanted}")
    return HeadConfig(
        family="EAGLE-1/2",
        body=body,
        draft_vocab_size=body.vocab_size,
        target_hidden_size=width,
        fc_bias=bias,
    )


def _body(folder: Path, inner: Mapping[str, Any], nested: bool) -> tuple[DecoderConfig, bool]:
    """The head's own layers, which are Llama's or Qwen3's, and whether queries and keys are normed.

    `rope_theta` defaults to 10000, whatever the target's is: that is what heads without the field were trained with.
    """
    kind = inner.get("model_type", "llama")
    architectures = inner.get("architectures") or [ARCHITECTURE]
    flat_llama = isinstance(architectures, list) and all("Llama" in str(name) for name in architectures)
    if kind not in (("llama", "qwen3") if nested else ("llama",)) or not (nested or flat_llama):
        raise ModelError(
            f"{folder}: config.json: the head's layers are of type {kind!r:.40}, architectures {architectures!r:.80};"
            " supported: Llama layers, and Qwen3 layers in speculators' layout"
        )
    try:
        return DecoderConfig.from_dict({**inner, "architectures": [ARCHITECTURE]}), kind == "qwen3"
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _eagle_options(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The options of EAGLE-3: top-level fields, and those of `eagle_config`, which SpecForge and ModelOpt write.

    Layer ids become ids of layers whose *input* is meant, as top-level ones are. In `eagle_config` two conventions live
    on: a list that begins with 1 names outputs, any other inputs (sglang tells them apart like this).
    """
    inner = raw.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise ModelError(f"{folder}: config.json: eagle_config is {inner!r:.80}; it must be a JSON object")
    name = "eagle_aux_hidden_state_layer_ids"
    options = {**inner, **raw}
    layers = raw.get(name) or inner.get(name) or None
    if layers is not None and (
        not isinstance(layers, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in layers)
    ):
        raise ModelError(f"{folder}: config.json: {name} is {layers!r:.80}; it must be a list of layers")
    if layers is not None and not raw.get(name) and layers[0] == 1:
        layers = [i + 1 for i in layers]
    return options | {name: layers}


def _eagle3(
    folder: Path, options: Mapping[str, Any], body: DecoderConfig, qk_norm: bool, target: DecoderConfig
) -> HeadConfig:
    before_fc, each = _flag(folder, options, "norm_before_fc"), _flag(folder, options, "fc_norm")
    if before_fc and each:
        raise ModelError(f"{folder}: config.json: norm_before_fc and fc_norm exclude each other")
    draft_vocab_size = _count(folder, options, "draft_vocab_size", body.vocab_size)
    if draft_vocab_size > body.vocab_size:
        raise ModelError(
            f"{folder}: config.json: draft_vocab_size is {draft_vocab_size}, vocab_size only {body.vocab_size}"
        )
    fuses = _flag(folder, options, "use_aux_hidden_state", default=True)
    if not fuses and body.hidden_size != target.hidden_size:
        raise ModelError(
            f"{folder}: config.json: use_aux_hidden_state is false, so hidden_size must be the target's"
            f" {target.hidden_size}, not {body.hidden_size}"
        )
    # norm_output as speculators and all servers read it. Up to its PR 879 SpecForge meant "normed for lm_head", and fed
    # back outputs as they are: the check at load tries both.
    return HeadConfig(
        family="EAGLE-3",
        body=body,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        feature_layers=_feature_layers(folder, options, target) if fuses else (),
        fuses=fuses,
        feature_norm="whole" if before_fc else "each" if each else "none",
        norm_before_residual=_flag(folder, options, "norm_before_residual"),
        feeds_back_norm=_flag(folder, options, "norm_output"),
        qk_norm=qk_norm,
    )


def _feature_layers(folder: Path, options: Mapping[str, Any], target: DecoderConfig) -> tuple[int, ...]:
    """Layers whose output is fused, from the ids of the layers whose input it is."""
    count = target.num_hidden_layers
    inputs = options["eagle_aux_hidden_state_layer_ids"] or [2, count // 2, count - 3]
    if inputs != sorted(set(inputs)) or not all(1 <= i <= count for i in inputs):
        raise ModelError(
            f"{folder}: the head fuses the inputs of layers {inputs!s:.80} (eagle_aux_hidden_state_layer_ids, or else"
            f" 2, L/2 and L-3); they must ascend from 1 to at most {count}, the number of the target's layers"
        )
    return tuple(i - 1 for i in inputs)


def _flag(folder: Path, options: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"{folder}: config.json: {name} is {value!r:.80}; it must be true or false")
    return value


def _count(folder: Path, options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder}: config.json: {name} is {value!r:.80}; it must be an integer of at least 1")
    return value


# ---- tensors


@dataclass(frozen=True, slots=True)
class _Source:
    """Headers by stored name; `loaded` holds the tensors of a .bin file, which is read as a whole."""

    headers: dict[str, StoredTensor]
    loaded: Mapping[str, Tensor] | None = None

    def read(self, names: list[str]) -> dict[str, Tensor]:
        if self.loaded is not None:
            return {name: self.loaded[name].contiguous() for name in names}
        return read_tensors({name: self.headers[name] for name in names}, None)


def _open(folder: Path) -> _Source:
    """The folder's safetensors, or else its pytorch_model.bin through an unpickler that knows tensors alone."""
    path = folder / PICKLE
    if any(folder.glob("*.safetensors")) or not path.is_file():
        return _Source(read_headers(folder))
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler and its archive raise whatever they like
        first = str(error).strip().splitlines()[:1]
        raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {''.join(first):.200}") from None
    if not isinstance(found, dict):
        raise WeightsError(f"{path} holds a {type(found).__name__}; it must be a dictionary of tensors")
    headers = {}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise WeightsError(f"{path.name}: {name!r:.80} is a {type(tensor).__name__}; it must be a plain tensor")
        headers[str(name)] = StoredTensor(path, tuple(tensor.shape), BIN_DTYPES.get(tensor.dtype, str(tensor.dtype)))
    return _Source(headers, found)


def _canonical(folder: Path, source: _Source) -> dict[str, str]:
    """Stored names by speculators name; what only training needs is left out."""
    names: dict[str, str] = {}
    for stored in source.headers:
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if name.endswith("rotary_emb.inv_freq") or name.startswith("verifier_"):
            continue
        if name in names:
            raise WeightsError(f"{folder}: tensors {names[name]} and {stored} are one and the same, {name}")
        names[name] = stored
    return names


def _read(folder: Path, config: HeadConfig, source: _Source, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Every tensor, checked against its header before the first is read."""
    shapes, shared = config.tensor_shapes(), config.shared_shapes()
    missing = [name for name in shapes if name not in names]
    if missing:
        raise WeightsError(f"{folder}: tensor {missing[0]} is missing, expected {list(shapes[missing[0]])}")
    unexpected = sorted(set(names) - set(shapes) - set(shared))
    if unexpected:
        raise WeightsError(
            f"{folder}: tensor {names[unexpected[0]]} is unexpected in an {config.family} head of"
            f" {config.body.num_hidden_layers} layers with the options of config.json"
        )
    for name, shape in (shapes | shared).items():
        if name in names:
            _check_tensor(names[name], shape, source.headers[names[name]], name)
    _check_shared(folder, config, names)
    read = source.read(list(names.values()))
    tensors = {name: read[stored] for name, stored in names.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{folder}: tensor {names[name]} holds values that are not finite")
    return tensors


def _check_tensor(stored: str, shape: tuple[int, ...], entry: StoredTensor, name: str) -> None:
    if entry.shape != shape:
        raise WeightsError(
            f"tensor {stored} in {entry.file.name} has shape {list(entry.shape)}; config.json expects {list(shape)}"
        )
    allowed = {D2T: ("I64", "I32"), T2D: ("BOOL",)}.get(name, FILE_DTYPES)
    if entry.dtype not in allowed:
        raise WeightsError(
            f"tensor {stored} in {entry.file.name} has type {entry.dtype}; allowed: {', '.join(allowed)}"
        )


def _check_shared(folder: Path, config: HeadConfig, names: Mapping[str, str]) -> None:
    """The target's embedding and head can stand in only where hidden states have the same width."""
    hidden, width = config.body.hidden_size, config.target_hidden_size
    for name in (EMBEDDING, HEAD):
        if name not in names and hidden != width and not (name == HEAD and config.body.tie_word_embeddings):
            raise WeightsError(
                f"{folder}: tensor {name} is missing, and the target's has {width} columns instead of {hidden}"
            )


def _target_ids(folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """int64 [draft vocab]: d2t holds offsets, target id = j + d2t[j]."""
    count, vocab = config.draft_vocab_size, config.body.vocab_size
    if D2T not in tensors:
        if count != vocab:
            raise WeightsError(f"{folder}: tensor {D2T} is missing; expected [{count}], as draft_vocab_size is {count}")
        return None
    ids = torch.arange(count) + tensors[D2T].long()
    outside = torch.nonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        j = int(outside[0])
        raise WeightsError(f"{folder}: tensor {D2T}: draft id {j} stands for {int(ids[j])}; the vocabulary has {vocab}")
    if len(torch.unique(ids)) != count:
        raise WeightsError(f"{folder}: tensor {D2T}: two draft ids stand for the same id of the target")
    known = tensors.get(T2D)
    if known is not None and not (int(known.sum()) == count and bool(known[ids].all())):
        raise WeightsError(f"{folder}: tensors {D2T} and {T2D} name different ids of the target")
    return ids
