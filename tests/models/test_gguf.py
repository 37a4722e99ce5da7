"""GGUF files become folders with exactly the values, rows and token ids that the file stands for."""

from __future__ import annotations

import json
import random
import shutil
import time
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
        r"head_count_kv is \[1, 2\]; it must be one number from 1 to 8192",
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


BLOCKS, THETA, EPS = "llama.block_count", "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"
NUMBERS: dict[str, tuple[str, Any, gguf.GGUFValueType, str]] = {
    "fraction": (BLOCKS, 1.5, gguf.GGUFValueType.FLOAT32, "block_count is 1.5; it must be a whole number"),
    "nan": (
        BLOCKS,
        float("nan"),
        gguf.GGUFValueType.FLOAT32,
        "block_count is nan; it must be one number from 1 to 1024",
    ),
    "negative": (BLOCKS, -1, gguf.GGUFValueType.INT32, "block_count is -1; it must be"),
    "enormous": (BLOCKS, 2**63, gguf.GGUFValueType.UINT64, "block_count is 9223372036854775808; it must be"),
    "text": (BLOCKS, "1", gguf.GGUFValueType.STRING, "block_count is '1'; it must be"),
    "bool": (BLOCKS, True, gguf.GGUFValueType.BOOL, "block_count is True; it must be"),
    "theta_infinite": (THETA, float("inf"), gguf.GGUFValueType.FLOAT32, "freq_base is inf; it must be"),
    "theta_enormous": (THETA, 1e300, gguf.GGUFValueType.FLOAT64, r"freq_base is 1e\+300; it must be"),
    "eps_nan": (EPS, float("nan"), gguf.GGUFValueType.FLOAT32, "rms_epsilon is nan; it must be"),
    "dims_nan": (
        "llama.rope.dimension_count",
        float("nan"),
        gguf.GGUFValueType.FLOAT32,
        "dimension_count is nan; supported: the head size, 64",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicated key")
@pytest.mark.parametrize("case", list(NUMBERS))
def test_wrong_numbers_name_file_key_and_range(tmp_path: Path, case: str) -> None:
    key, value, kind, message = NUMBERS[case]
    write_gguf(tmp_path / "m.gguf", change=lambda writer: replace_value(writer, key, value, kind))
    with pytest.raises(ModelError, match=rf"m\.gguf: .*{message}"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def replace_value(writer: gguf.GGUFWriter, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, kind)


def test_a_number_array_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    length_at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    started = time.monotonic()
    for length in (2**21, 2**40, 2**63):
        data[length_at : length_at + 8] = length.to_bytes(8, "little")
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(ModelError, match="not a whole GGUF file"):
            GGUFFile(tmp_path / "m.gguf")
    assert time.monotonic() - started < 5


def test_text_that_is_not_utf8_is_refused_by_key(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(b"<|im_start|>", b"<|im_st\xffrt|>", 1))
    with pytest.raises(ModelError, match=r"m\.gguf: metadata key tokenizer\.ggml\.tokens cannot be read"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_any_wrong_bytes_give_a_model_or_a_model_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Kind.Q8_0)
    whole = (tmp_path / "m.gguf").read_bytes()
    head = int(GGUFFile(tmp_path / "m.gguf")._reader.data_offset)
    rng = random.Random(0)
    started, outcomes = time.monotonic(), {"loaded": 0, "refused": 0}
    for case in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data) if case % 10 == 0 else head)] ^= rng.randrange(1, 256)
        (tmp_path / "m.gguf").write_bytes(data)
        try:
            convert(tmp_path / "m.gguf", tmp_path / "out")
            load_weights(tmp_path / "out", DecoderConfig.from_folder(tmp_path / "out"))
            Tokenizer(tmp_path / "out").encode(TEXT)
            outcomes["loaded"] += 1
        except ModelError:
            outcomes["refused"] += 1
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert min(outcomes.values()) > 20, outcomes
    assert time.monotonic() - started < 60


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
    "eos_text": ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2'; the vocabulary has"),
    "eos_nan": ({"tokenizer.ggml.eos_token_id": float("nan")}, "eos_token_id is nan; the vocabulary has"),
    "eot_list": ({"tokenizer.ggml.eot_token_id": [2]}, r"eot_token_id is \[2\]; the vocabulary has"),
    "bos_bool": ({"tokenizer.ggml.bos_token_id": True}, "bos_token_id is True; the vocabulary has"),
    "bos_fraction": ({"tokenizer.ggml.bos_token_id": 1.5}, "bos_token_id is 1.5; the vocabulary has"),
    "pad_negative": ({"tokenizer.ggml.padding_token_id": -1}, "padding_token_id is -1; the vocabulary has"),
    "unk_negative": ({"tokenizer.ggml.unknown_token_id": -1}, "unknown_token_id is -1; the vocabulary has"),
    "tokens_number": ({"tokenizer.ggml.tokens": 5}, "tokens is 5; it must be an array of str"),
    "tokens_text": ({"tokenizer.ggml.tokens": "abc"}, "tokens is 'abc'; it must be an array of str"),
    "tokens_numbers": ({"tokenizer.ggml.tokens": ["a", 2, "b"]}, r"tokens\[1\] is 2; it must be str"),
    "merges_number": ({"tokenizer.ggml.merges": 7}, "merges is 7; it must be an array of str"),
    "merges_numbers": ({"tokenizer.ggml.merges": [7]}, r"merges\[0\] is 7; it must be str"),
    "merges_one": ({"tokenizer.ggml.merges": ["ab"]}, "tokens and merges do not fit together"),
    "types_number": ({"tokenizer.ggml.token_type": 1}, "token_type is 1; it must be an array of int"),
    "types_texts": ({"tokenizer.ggml.token_type": ["1"]}, r"token_type\[0\] is '1'; it must be int"),
    "types_nan": ({"tokenizer.ggml.token_type": [float("nan")]}, r"token_type\[0\] is nan; it must be int"),
    "template": ({"tokenizer.chat_template": [1]}, r"chat_template is \[1\]; it must be text"),
    "add_bos": ({"tokenizer.ggml.add_bos_token": "no"}, "add_bos_token is 'no'; it must be a bool"),
    "pre_list": ({"tokenizer.ggml.pre": ["gpt-2"]}, r"pre is \['gpt-2'\]; supported"),
}


@pytest.mark.parametrize("case", list(TOKENIZER_REFUSED))
def test_tokenizers_that_cannot_be_rebuilt_are_refused(tmp_path: Path, case: str) -> None:
    change, message = TOKENIZER_REFUSED[case]
    metadata = {**tokenizer_metadata(), **change}
    if case == "no_tokens":
        del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ModelError, match=message):
        build(tmp_path, metadata)
