"""The decoder's logits are transformers' logits, however the same tokens are cut into rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
import torch
from paged import NUM_PAGES, PAGE_SIZE, Paged, difference
from specserve_kernels import AttentionRows
from tiny import LLAMA3_ROPE, TinyLlama, tiny_config
from torch import Tensor

from specserve.errors import ModelError, ModelNotFound
from specserve.models.decoder import DecoderConfig, rope_table
from specserve.models.weights import load_decoder

TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa_tied": {},
    "untied": {"tied": False, "seed": 1},
    "one_kv_head": {"heads": 6, "kv_heads": 1, "hidden": 48, "seed": 2},
    "no_gqa": {"heads": 4, "kv_heads": 4, "layers": 1, "seed": 3},
    "odd_groups": {"heads": 9, "kv_heads": 3, "hidden": 72, "seed": 4},
    "llama3_rope": {"llama3": True, "head_dim": 16, "seed": 5},
    "wide_heads": {"head_dim": 24, "tied": False, "seed": 6},
}


def reference_logits(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Path:
    return tiny_llama(**VARIANTS[request.param])


@pytest.fixture
def paged(folder: Path) -> Paged:
    return Paged(load_decoder(folder, specserve_kernels.load("torch")))


def test_prefill_chunks_decode_and_tree_equal_transformers(folder: Path, paged: Paged) -> None:
    ids = random_ids(57)
    expected = reference_logits(folder, ids)
    assert expected.std() > 0.5  # a model whose logits are all alike would prove nothing
    assert difference(paged.chunk(ids, 0), expected) <= TOLERANCE

    chunked = Paged(paged.decoder)
    parts = [chunked.chunk(ids[start:stop], start) for start, stop in ((0, 13), (13, 40), (40, 57))]
    assert difference(torch.cat(parts), expected) <= TOLERANCE

    decoded = Paged(paged.decoder)
    steps = [decoded.chunk(ids[:30], 0)] + [decoded.chunk([ids[slot]], slot) for slot in range(30, 57)]
    assert difference(torch.cat(steps), expected) <= TOLERANCE


def test_tree_rows_equal_their_chains_in_transformers(folder: Path, paged: Paged) -> None:
    prompt = random_ids(21)
    nodes = random_ids(8, seed=9)
    parents = [-1, 0, 0, 2, 2, 3, 1, 5]
    paged.chunk(prompt, 0)
    logits = paged.tree(nodes, parents, len(prompt))
    for row in range(len(nodes)):
        chain = [nodes[0], *(nodes[node] for node in Paged.path(parents, row))]
        expected = reference_logits(folder, prompt + chain)[-1]
        assert difference(logits[row], expected) <= TOLERANCE, f"row {row}"


def test_two_sequences_in_one_step_do_not_mix(tiny_llama: TinyLlama) -> None:
    folder = tiny_llama()
    decoder = load_decoder(folder, specserve_kernels.load("torch"))
    paged = Paged(decoder)
    table = paged.table[0].view(2, NUM_PAGES // 2)
    prompts = [random_ids(9, seed=1), random_ids(14, seed=2)]
    positions = [p for prompt in prompts for p in range(len(prompt))]
    owner = [index for index, prompt in enumerate(prompts) for _ in prompt]
    slots = [int(table[s, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for s, p in zip(owner, positions, strict=True)]
    rows = AttentionRows(
        sequence=torch.tensor(owner, dtype=torch.int32),
        prefix_len=torch.tensor(positions, dtype=torch.int32) + 1,
        tail_slots=torch.zeros(len(owner), 0, dtype=torch.int32),
        tail_len=torch.zeros(len(owner), dtype=torch.int32),
        page_table=table.contiguous(),
    )
    hidden = decoder.forward(
        torch.tensor(prompts[0] + prompts[1]), torch.tensor(positions), torch.tensor(slots), rows, paged.kv
    )
    logits = decoder.logits(hidden)
    assert difference(logits[:9], reference_logits(folder, prompts[0])) <= TOLERANCE
    assert difference(logits[9:], reference_logits(folder, prompts[1])) <= TOLERANCE


def test_bf16_rows_have_the_same_bits_whole_and_in_chunks(tiny_llama: TinyLlama) -> None:
    folder = tiny_llama(dtype=torch.bfloat16, seed=8)
    decoder = load_decoder(folder, specserve_kernels.load("torch"))
    assert decoder.dtype == torch.bfloat16
    ids = random_ids(60)
    whole, cut = Paged(decoder), Paged(decoder)
    expected = whole.chunk(ids, 0)
    found = torch.cat([cut.chunk(ids[:7], 0), cut.chunk(ids[7:48], 7), cut.chunk(ids[48:], 48)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("llama3", [False, True])
def test_rope_table_equals_transformers_to_the_last_position(llama3: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = tiny_config(300, head_dim=64, max_positions=8192, llama3=llama3)
    table = rope_table(DecoderConfig.from_dict(raw))
    embedding = LlamaRotaryEmbedding(LlamaConfig(**raw))
    cos, sin = embedding(torch.zeros(1), torch.arange(8192).unsqueeze(0))
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    assert torch.equal(table, expected)


def test_old_and_new_spellings_of_rope_scaling_mean_the_same() -> None:
    new = tiny_config(300, llama3=True)
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = 10000.0
    old["rope_scaling"] = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    legacy = {**old, "rope_scaling": {**old["rope_scaling"], "type": "llama3"}}
    del legacy["rope_scaling"]["rope_type"]
    assert DecoderConfig.from_dict(new) == DecoderConfig.from_dict(old) == DecoderConfig.from_dict(legacy)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["Qwen2ForCausalLM"]}, r"Qwen2ForCausalLM.*supported.*LlamaForCausalLM"),
    "no_architecture": ({"architectures": None, "model_type": "gpt2"}, "architectures is"),
    "attention_bias": ({"attention_bias": True}, "attention_bias"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias"),
    "hidden_act": ({"hidden_act": "gelu"}, "'gelu'; supported: 'silu'"),
    "rope_type": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'; supported"),
    "partial_rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
    "heads": ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
    "odd_head": ({"head_dim": 7}, "head_dim is 7"),
    "missing": ({"vocab_size": None}, "vocab_size is missing"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "fraction": ({"hidden_size": 32.5}, "hidden_size is 32.5; it must be a whole number"),
    "text": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "long": (
        {"max_position_embeddings": 1e13},
        "max_position_embeddings is 10000000000000.0; it must be one number from 1 to 16777",
    ),
    "layers": ({"num_hidden_layers": 1e7}, "num_hidden_layers is 10000000.0; it must be one number from 1 to 1024"),
    "vocab": ({"vocab_size": 2**22 + 1}, "vocab_size is 4194305; it must be one number from 1 to 4194304"),
    "hidden": ({"hidden_size": 2**18}, "hidden_size is 262144; it must be one number from 1 to 131072"),
    "inner": ({"intermediate_size": 2**21}, "intermediate_size is 2097152; it must be"),
    "googol": ({"hidden_size": 10**400}, "hidden_size is 10000.{0,80}; it must be one number"),
    "theta": ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is 10000.{0,80}; it must be one number"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be"),
    "infinite": ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf; it must be"),
    "bool": ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be"),
    "more_heads_than_hidden": ({"head_dim": None, "hidden_size": 2}, "head_dim is 0; it must be"),
    "tie_text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    "tie_number": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    "bias_text": ({"mlp_bias": ""}, "mlp_bias is ''; supported: false"),
    "rope_list": ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be a JSON object"),
    "rope_scaling_text": (
        {"rope_parameters": None, "rope_scaling": "linear"},
        "rope_scaling is 'linear'; it must be a JSON object",
    ),
    "quantization_text": ({"quantization_config": "awq"}, r"quantized \(awq\)"),
    "llama3_length": (
        {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 1e13}},
        "original_max_position_embeddings is 10000000000000.0; it must be",
    ),
    "llama3_factors": (
        {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
        "high_freq_factor 1.0 must be above",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_configs_that_are_not_computed_are_refused(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_dict({**tiny_config(300), **change})


def test_config_file_errors_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not valid JSON"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must be a JSON object"):
        DecoderConfig.from_folder(tmp_path)
