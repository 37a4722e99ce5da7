"""Tiny random Llama folders, with a tokenizer and a chat template, for every test that needs a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "t h,th e,Ġ t,Ġ a,i n,e r,o n,r e,Ġ the,a n,a t,e n,o u,Ġ s,Ġ w,i t,e s,o r,in g,Ġ f,Ġa n,Ġan d,d e,l l,h e,"
    "Ġ o,Ġo f,Ġ in,e d,i s,Ġ c,Ġ b,a r,l o,Ġ to,w o,wo r,l d,wor ld,H e,He ll,Hell o,a l,Ġ m"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TinyLlama = Callable[..., Path]
"""`tiny_llama(layers=2, heads=4, kv_heads=2, hidden=32, head_dim=None, tied=True, seed=0, ...) -> folder`."""


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 300 tokens: three special ones, all bytes, some merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    for merge in MERGES.split(","):
        left, right = merge.split(" ")
        if left in vocab and right in vocab:
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer_folder(folder: Path) -> int:
    """Write the tiny tokenizer's files; returns its vocabulary size."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size())


def tiny_config(
    vocab_size: int,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 32,
    head_dim: int | None = None,
    tied: bool = True,
    max_positions: int = 512,
    llama3: bool = False,
) -> dict[str, Any]:
    """A config.json of a tiny Llama; `llama3` = Llama 3 rope scaling with a trained length of 32."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE if llama3 else {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "max_position_embeddings": max_positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights that make the layers matter: norms near 1, logits with a spread of about 2."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(hidden, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.0), "model.norm.weight": norm()}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        weights |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    return weights


def write_tiny_llama(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a whole tiny model folder; `options` as in `tiny_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(write_tokenizer_folder(folder), **options)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    weights = {name: tensor.to(dtype) for name, tensor in tiny_weights(config, seed).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
