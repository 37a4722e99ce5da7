"""Turning a GGUF file of the llama architecture into an ordinary Hugging Face folder, once.

Everything after the conversion reads that folder, so there is one way to load weights. Tensors are dequantised
exactly and rounded to bf16; the row order that llama.cpp gives q and k for its own rotary layout is undone. The
folder appears under its name only when it is whole: it is written beside it and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ModelError, ModelNotFound, WeightsError
from specserve.models.decoder import (
    ARCHITECTURE,
    RANGES,
    DecoderConfig,
    Llama3Scaling,
    checked_number,
    checked_size,
    inverse_frequencies,
    llama3_frequencies,
)
from specserve.models.gguf_tokenizer import write_tokenizer

# Part of the cache key of a converted folder: raise it whenever the folder's content changes.
CONVERTER_VERSION = 1
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
# Longest metadata array that is read; the largest vocabularies have some 600,000 merges.
MAX_ARRAY = 2**22

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`; `done` and `total` count bytes or tensors of the stage `what`."""


class _BoundedReader(GGUFReader):  # type: ignore[misc]  # gguf has no types
    """Refuses to read past the end: the reader itself then gets empty values, and counts through them for years.

    Arrays of numbers are read at once; the reader itself takes them one by one.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if not 0 <= int(offset) <= len(self.data) - np.dtype(dtype).itemsize * int(count):
            raise ValueError(f"{int(count)} values at byte {int(offset)} end past the end of the file")
        values: NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_kind, raw_length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, length = GGUFValueType(raw_kind[0]), int(raw_length[0])
        if length > MAX_ARRAY:
            raise ValueError(f"an array of {length} values at byte {int(orig_offs)}; at most {MAX_ARRAY} are read")
        if kind in self.gguf_scalar_to_np:
            values = self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], length)
            return 12 + int(values.nbytes), [raw_kind, raw_length, values], [2], [GGUFValueType.ARRAY, kind]
        self._get(orig_offs + 12, np.uint64, length)  # every text or array begins with at least that
        return super()._get_field_parts(orig_offs, raw_type)


class GGUFFile:
    """One open file: metadata by key, tensors by llama.cpp's names.

    Raises:
        ModelNotFound: there is no such file.
        ModelError: it is not a GGUF file, is cut short, or holds another architecture.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist or is no file; give the path of a .gguf file")
        self.path = path
        try:
            with np.errstate(all="ignore"):  # sums of offsets that wrap are refused as offsets
                self._reader = _BoundedReader(path)
        except MemoryError:
            raise
        except Exception as error:  # the reader trips over wrong bytes in many ways
            raise ModelError(
                f"{path} is not a whole GGUF file ({type(error).__name__}: {error}); fetch it again"
            ) from None
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path}: general.architecture is {architecture!r:.80}; supported: 'llama'")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python object, or `default`; ModelError if its bytes are no such value."""
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ModelError(f"{self.path}: metadata key {key} cannot be read: {error}; fetch it again") from None

    def number(self, key: str, name: str, default: float | None = None) -> int | float:
        """A metadata value in the range of config field `name`; ModelError if it is absent or anything else."""
        return checked_number(f"{self.path}: metadata key {key}", name, self.get(key, default))

    def size(self, key: str, name: str, default: int | None = None) -> int:
        """As `number`, for fields that count something."""
        return checked_size(f"{self.path}: metadata key {key}", name, self.get(key, default))

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised, in the row-major shape that torch uses.

        Raises:
            WeightsError: its type is not one of `TYPES`.
        """
        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.tensor_type)
        if kind.name not in TYPES:
            raise WeightsError(f"tensor {name} in {self.path} has type {kind.name}; supported: {', '.join(TYPES)}")
        with np.errstate(all="ignore"):  # scales may be anything, as in the other loaders
            values = np.asarray(dequantize(tensor.data, kind), dtype=np.float32)
        return values.reshape([int(size) for size in reversed(tensor.shape)])


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The Hugging Face config.json of the file's model, without token ids.

    Raises:
        ModelError: a key is missing, or asks for what the decoder does not compute.
    """
    _refuse_unsupported(file)
    heads = file.size("llama.attention.head_count", "num_attention_heads")
    hidden = file.size("llama.embedding_length", "hidden_size")
    head_dim = file.size("llama.attention.key_length", "head_dim", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.get(key, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {key} is {file.get(key)!r:.80}; supported: the head size, {head_dim}")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": hidden,
        "intermediate_size": file.size("llama.feed_forward_length", "intermediate_size"),
        "num_hidden_layers": file.size("llama.block_count", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("llama.attention.head_count_kv", "num_key_value_heads", heads),
        "head_dim": head_dim,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "rms_norm_eps": _shortest(file.number("llama.attention.layer_norm_rms_epsilon", "rms_norm_eps")),
        "rope_theta": _shortest(file.number("llama.rope.freq_base", "rope_theta", 10000.0)),
        "max_position_embeddings": file.size("llama.context_length", "max_position_embeddings"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if ROPE_FACTORS in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    return config


def _refuse_unsupported(file: GGUFFile) -> None:
    if file.get("llama.expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts; supported: dense llama models")
    scaling = file.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{file.path}: llama.rope.scaling.type is {scaling!r:.80}; supported: 'none', llama 3 factors")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path}: tensor token_embd.weight is missing")
    shape = file.tensors["token_embd.weight"].shape.tolist()
    if len(shape) != 2:
        raise WeightsError(f"{file.path}: tensor token_embd.weight has shape {shape!s:.80}; it must have two sizes")


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-5 as fp32, whose fp64 value is 9.999999747e-06."""
    return float(str(np.float32(value)))


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp stores Llama 3.1's scaling as ready factors; find the parameters that give exactly those."""
    factors = torch.from_numpy(file.read(ROPE_FACTORS).copy()).flatten()
    factor = max(factors.tolist(), default=0.0)
    inverse = inverse_frequencies(DecoderConfig.from_dict(config))
    scaling = Llama3Scaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    expected = inverse / llama3_frequencies(inverse, scaling)
    least, most = RANGES["factor"]
    if (
        factors.shape != expected.shape
        or not least <= factor <= most
        or not torch.allclose(factors, expected, rtol=1e-4)
    ):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} is not Llama 3 scaling (low 1, high 4, trained length 8192, any factor),"
            " the only kind supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a llama.cpp tensor name; None if it has none."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[3] == "weight":
        layer = LAYER_NAMES.get(parts[2])
        return layer and f"model.layers.{parts[1]}.{layer}.weight"
    return None


def unpermute(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows [heads * dim, in] from llama.cpp's order (pairs 2i, 2i + 1 rotate) to Hugging Face's (i, i + dim / 2)."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def read_tensors(file: GGUFFile, config: DecoderConfig, progress: Progress | None = None) -> dict[str, Tensor]:
    """All tensors under their Hugging Face names, in bf16.

    Raises:
        WeightsError: a tensor is unknown, missing, of an unsupported type or of another shape than `config` says.
    """
    shapes = config.tensor_shapes()
    names: dict[str, str] = {}
    for name in file.tensors:
        target = hf_name(name)
        if name == ROPE_FACTORS:
            continue
        if target not in shapes:
            raise WeightsError(f"tensor {name} in {file.path} is unexpected: not part of a plain llama model")
        names[target] = name
    missing = [target for target in shapes if target not in names]
    if missing:
        raise WeightsError(f"{file.path}: the tensor for {missing[0]} is missing ({len(missing)} in all)")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, Tensor] = {}
    for index, (target, name) in enumerate(names.items()):
        values = file.read(name)
        if values.shape != shapes[target]:
            raise WeightsError(
                f"tensor {name} in {file.path} has shape {list(values.shape)}; its metadata say {list(shapes[target])}"
            )
        kind = target.rsplit(".", 2)[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        tensors[target] = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch.bfloat16)
        if progress is not None:
            progress("converting", index + 1, len(names))
    return tensors


def convert(gguf_path: Path, out_dir: Path, progress: Progress | None = None) -> None:
    """Write `out_dir`: config.json, generation_config.json, model.safetensors (bf16) and the tokenizer's files.

    `out_dir` must not exist; it appears only when it is whole. A killed run leaves a sibling folder named
    `.<name>.tmp-<pid>`, which whoever holds the cache lock may delete.

    Raises:
        ModelError, WeightsError: the file is not one that can be converted; nothing is left behind.
    """
    file = GGUFFile(gguf_path)
    config = read_config(file)
    shape = DecoderConfig.from_dict(config)
    temporary = out_dir.parent / f".{out_dir.name}.tmp-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        token_ids = write_tokenizer(file.get, temporary, shape.max_position_embeddings)
        _write_json(temporary / "config.json", {**config, **token_ids})
        _write_json(temporary / "generation_config.json", {"_from_model_config": True, **token_ids})
        save_file(read_tensors(file, shape, progress), temporary / "model.safetensors", metadata={"format": "pt"})
        _settle(temporary)
        temporary.replace(out_dir)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _settle(folder: Path) -> None:
    """Put the files on disk before the rename makes them count, readable by whoever the umask allows."""
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
