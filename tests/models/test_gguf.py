"""GGUF files become folders with exactly the values, rows and token ids that the file stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import specserve_kernels
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import FORMATS, SHAPE, tokenizer_metadata, write_gguf
from tiny import tiny_config, tiny_tokenizer

from specserve.errors import ModelError, ModelNotFound, WeightsError
from specserve.models.decoder import DecoderConfig, inverse_frequencies, llama3_frequencies
from specserve.models.gguf import GGUFFile, convert, read_config
from specserve.models.gguf_tokenizer import write_tokenizer
from specserve.models.weights import load_decoder, load_weights
from specserve.tokenizer import Tokenizer

TEXT = "Hello world, and the rest: 12345 été 🙂\n  of it"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *FORMATS], ids=lambda kind: kind.name)
def test_round_trip_of_every_type(tmp_path: Path, kind: Kind) -> None:
    expected = write_gguf(tmp_path / "m.gguf", kind, tied=kind != Kind.Q4_0)
    seen: list[tuple[str, int, int]] = []
    convert(tmp_path / "m.gguf", tmp_path / "out", lambda *event: seen.append(event))
    config = DecoderConfig.from_folder(tmp_path / "out")
    loaded = load_weights(tmp_path / "out", config)
    assert set(loaded) == set(expected)
    for name, values in expected.items():
        assert torch.equal(loaded[name], torch.from_numpy(values.copy()).to(torch.bfloat16)), name
    assert seen[-1] == ("converting", len(expected), len(expected))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_config_and_tokenizer_of_the_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    vocab_size = tiny_tokenizer().get_vocab_size()
    assert DecoderConfig.from_folder(tmp_path / "out") == DecoderConfig.from_dict(tiny_config(vocab_size, **SHAPE))
    ours = Tokenizer(tmp_path / "out")
    assert ours.encode(TEXT) == tiny_tokenizer().encode(TEXT).ids
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.eos_token_ids == (2,)
    assert ours.decode(ours.encode_chat([{"role": "user", "content": "Hello"}])) == "user\nHello\nassistant\n"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2]
    load_decoder(tmp_path / "out", specserve_kernels.load("torch"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_rope_scaling(tmp_path: Path, factor: float) -> None:
    raw = {
        **tiny_config(300, **SHAPE),
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    config = DecoderConfig.from_dict(raw)
    assert config.rope_scaling is not None
    inverse = inverse_frequencies(config)
    factors = (inverse / llama3_frequencies(inverse, config.rope_scaling)).numpy()
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    convert(tmp_path / "m.gguf", tmp_path / "out")
    assert DecoderConfig.from_folder(tmp_path / "out").rope_scaling == config.rope_scaling

    odd = factors * np.linspace(1, 2, len(factors), dtype=np.float32)
    write_gguf(tmp_path / "odd.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", odd))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3 scaling"):
        convert(tmp_path / "odd.gguf", tmp_path / "odd")


REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "architecture": ({"arch": "qwen2"}, ModelError, "general.architecture is 'qwen2'; supported: 'llama'"),
    "missing": ({"skip": ("blk.0.attn_k.weight",)}, WeightsError, r"k_proj\.weight is missing \(1 in all\)"),
    "no_embedding": ({"skip": ("token_embd.weight",)}, WeightsError, r"token_embd\.weight is missing"),
    "bias": (
        {"change": lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(4, np.float32))},
        WeightsError,
        r"blk\.0\.attn_q\.bias .*unexpected",
    ),
    "experts": ({"change": lambda w: w.add_expert_count(4)}, ModelError, "mixture of experts"),
    "per_layer_heads": (
        {"change": lambda w: w.add_head_count_kv([1, 2])},
        ModelError,
        r"head_count_kv is \[1, 2\]; supported: one number above 0",
    ),
    "yarn": (
        {"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
        ModelError,
        "scaling.type is 'yarn'",
    ),
    "rope_dim": ({"change": lambda w: w.add_rope_dimension_count(16)}, ModelError, "dimension_count is 16; supported"),
    "key_len": ({"change": lambda w: w.add_key_length(32)}, WeightsError, r"has shape \[256, 256\].*\[128, 256\]"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_files_that_cannot_be_used_are_refused_and_leave_nothing(tmp_path: Path, case: str) -> None:
    options, error, message = REFUSED[case]
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(error, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((1, 144), dtype=np.uint8)
        writer.add_tensor("blk.0.extra.weight", blocks, raw_dtype=Kind.Q4_K)

    write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(WeightsError, match=r"blk\.0\.extra\.weight .*has type Q4_K; supported: F32, F16, BF16, Q8_0"):
        GGUFFile(tmp_path / "m.gguf").read("blk.0.extra.weight")


@pytest.mark.parametrize("keep", [0, 3, 50, 0.01, 0.5, 0.99])
def test_cut_files_are_refused(tmp_path: Path, keep: float) -> None:
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match="fetch it again"):
        GGUFFile(tmp_path / "cut.gguf")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello " * 100)
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        GGUFFile(tmp_path / "text.gguf")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ModelError, match=r"metadata key llama\.attention\.head_count is missing"):
        read_config(GGUFFile(tmp_path / "m.gguf"))


def build(folder: Path, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    write_tokenizer(metadata.get, folder, 128)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def with_digit_merges(pre: str) -> dict[str, Any]:
    """The tiny vocabulary plus tokens 12, 123, 1234 and their merges: how digits are split becomes visible."""
    metadata = tokenizer_metadata(pre)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "12", "123", "1234"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 1, 1]
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "1 2", "12 3", "123 4"]
    return metadata


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["1234", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<|im_start|>", "123", "4", "5"]),
    ],
)
def test_pre_tokenizers_split_digits_as_llama_cpp_does(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    tokenizer = build(tmp_path, with_digit_merges(pre))
    assert tokenizer.encode("12345").tokens == tokens
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>", "<unk>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 2]
    tokenizer = build(tmp_path, metadata)
    assert tokenizer.encode("a<tool>b<|im_end|>").tokens == ["a", "<tool>", "b", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("a<tool>b<|im_end|><unk>").ids) == "a<tool>b"


def test_end_of_turn_joins_the_eos_list(tmp_path: Path) -> None:
    metadata = {**tokenizer_metadata(), "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    assert write_tokenizer(metadata.get, tmp_path, 128)["eos_token_id"] == [0, 2]


TOKENIZER_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"tokenizer.ggml.pre": "deepseek-llm"}, "pre is 'deepseek-llm'; supported: 'smollm', 'gpt-2', 'llama-bpe'"),
    "model": ({"tokenizer.ggml.model": "llama"}, "model is 'llama'; supported: 'gpt2'"),
    "no_tokens": ({"tokenizer.ggml.tokens": [], "tokenizer.ggml.bos_token_id": None}, "0 tokens"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, "3 tokens, 2 of them distinct"),
    "merges": ({"tokenizer.ggml.merges": ["qq zz"]}, "tokens and merges do not fit together"),
    "types": ({"tokenizer.ggml.token_type": [1, 2]}, "but 2 token types"),
    "eos": ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id is 99999; the vocabulary has"),
}


@pytest.mark.parametrize("case", list(TOKENIZER_REFUSED))
def test_tokenizers_that_cannot_be_rebuilt_are_refused(tmp_path: Path, case: str) -> None:
    change, message = TOKENIZER_REFUSED[case]
    metadata = {**tokenizer_metadata(), **change}
    if case == "no_tokens":
        del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ModelError, match=message):
        build(tmp_path, metadata)
