"""Tiny GGUF files of every quantisation type, and the values they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_config, tiny_tokenizer, tiny_weights

from specserve.models.gguf import LAYER_NAMES, TOP_NAMES

Array = NDArray[Any]
# Q6_K has super-blocks of 256 values, so rows must be that long.
SHAPE: dict[str, Any] = {"layers": 1, "heads": 4, "kv_heads": 2, "hidden": 256, "max_positions": 128}


def halves(blocks: Array, start: int) -> Array:
    """The fp16 at byte `start` of each block, as fp32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def nibbles(data: Array) -> Array:
    return np.concatenate((data & 15, data >> 4), axis=1).astype(np.float32)


def q6_k(blocks: Array) -> Array:
    """As in ggml's dequantize_row_q6_K, one value at a time: 4 + 2 bits, a scale per 16 values, one for all."""
    out = np.zeros((len(blocks), 256), dtype=np.float32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    for i in range(256):
        half, within = divmod(i, 128)
        quarter, lane = divmod(within, 32)
        low = blocks[:, half * 64 + (quarter % 2) * 32 + lane]
        low = low & 15 if quarter < 2 else low >> 4
        high = (blocks[:, 128 + half * 32 + lane] >> (2 * quarter)) & 3
        value = (low | (high << 4)).astype(np.float32) - 32
        out[:, i] = halves(blocks, 208)[:, 0] * scales[:, i // 16] * value
    return out


# (bytes a block, values a block, blocks → values), written from the format's description, not from the package.
FORMATS: dict[Kind, tuple[int, int, Callable[[Array], Array]]] = {
    Kind.Q8_0: (34, 32, lambda b: halves(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)),
    Kind.Q4_0: (18, 32, lambda b: halves(b, 0) * (nibbles(b[:, 2:]) - 8)),
    Kind.Q4_1: (20, 32, lambda b: halves(b, 0) * nibbles(b[:, 4:]) + halves(b, 2)),
    Kind.Q6_K: (210, 256, q6_k),
}


def encode(values: Array, kind: Kind, rng: np.random.Generator) -> tuple[Array, Array]:
    """Stored data of a matrix in `kind` and the values it stands for; quantised blocks are random bits."""
    if kind == Kind.F32:
        return values, values
    if kind == Kind.F16:
        half = values.astype(np.float16)
        return half, half.astype(np.float32)
    if kind == Kind.BF16:
        rounded = torch.from_numpy(values).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint8), rounded.float().numpy()
    size, count, decode = FORMATS[kind]
    blocks = rng.integers(0, 256, (values.size // count, size), dtype=np.uint8)
    scales = np.array([0.01, -0.02, 0.005, 0.003], dtype=np.float16)[rng.integers(0, 4, (len(blocks), 2))]
    where = 208 if kind == Kind.Q6_K else 0
    width = 4 if kind == Kind.Q4_1 else 2
    blocks[:, where : where + width] = scales.view(np.uint8)[:, :width]
    return blocks.reshape(values.shape[0], -1), decode(blocks).reshape(values.shape)


def permute(values: Array, heads: int) -> Array:
    """llama.cpp's convert_hf_to_gguf.py, `permute`."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def write_gguf(
    path: Path, kind: Kind = Kind.F32, change: Callable[[gguf.GGUFWriter], object] = lambda writer: None, **options: Any
) -> dict[str, Array]:
    """Write a tiny llama GGUF with matrices in `kind`; returns the values by Hugging Face name, in HF row order."""
    skip = options.pop("skip", ())
    arch = options.pop("arch", "llama")
    config = tiny_config(tiny_tokenizer().get_vocab_size(), **{**SHAPE, **options})
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config)
    change(writer)  # may also overwrite metadata
    rng = np.random.default_rng(0)
    names = {hf: name for name, hf in TOP_NAMES.items()}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{name}.weight" for name, hf in LAYER_NAMES.items()}
    expected = {}
    for target, tensor in tiny_weights(config).items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(target.split(".")[-2])
        values = tensor.numpy()
        stored_kind = kind if values.ndim == 2 else Kind.F32
        data, stands_for = encode(values, stored_kind, rng)
        if heads:  # rows are permuted whole, so blocks along a row stay as they are
            data = permute(data, config[heads])
        if names[target] not in skip:
            raw = None if stored_kind in (Kind.F32, Kind.F16) else stored_kind
            writer.add_tensor(names[target], np.ascontiguousarray(data), raw_dtype=raw)
        expected[target] = stands_for
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return expected


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in tokenizer_metadata().items():
        name = key.removeprefix("tokenizer.ggml.")
        if name == "tokenizer.chat_template":
            writer.add_chat_template(value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)


def tokenizer_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    state = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
