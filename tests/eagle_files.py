"""EAGLE heads as files, in every layout that is read: random numbers for a tiny target, as each trainer writes them.

`head_tensors` names tensors as speculators do; `write_head` renames them for a layout. Options not given are off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_llama
from torch import Tensor

Tensors = dict[str, Tensor]


def head_config(target: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A flat EAGLE-3 config with the target's sizes, its own rope base left out; `options` are added or replaced."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = {name: target[name] for name in names}
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    return config | fixed | {"draft_vocab_size": 96, "max_position_embeddings": 64} | options


def target_ids(config: dict[str, Any], seed: int = 0) -> Tensor:
    """Which of the target's ids the draft vocabulary holds, ascending."""
    order = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(seed))
    return order[: config["draft_vocab_size"]].sort().values


def head_tensors(
    config: dict[str, Any],
    seed: int = 0,
    *,
    num_features: int = 3,
    eagle1: bool = False,
    bias: bool = False,
    own_embedding: bool = False,
    own_head: bool = True,
    qk_norm: bool = False,
) -> Tensors:
    """fp32 numbers that make every part matter, by speculators name."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    wide = config.get("target_hidden_size", hidden)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def norm(size: int = hidden) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": matrix(hidden, 2 * hidden if eagle1 else num_features * wide)}
    if bias:
        tensors["fc.bias"] = torch.randn(hidden, generator=generator)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_features * wide)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(wide) for i in range(num_features)}
    for index in range(config["num_hidden_layers"]):
        prefix, first = f"layers.{index}.", not index
        width = 2 * hidden if first and not eagle1 else hidden
        q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": matrix(q_size, width),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_size, width),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_size, width),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
        if qk_norm:
            tensors |= {f"{prefix}self_attn.{name}.weight": norm(dim) for name in ("q_norm", "k_norm")}
        if first and not eagle1:
            tensors[f"{prefix}hidden_norm.weight"] = norm()
        if not (first and eagle1):
            tensors[f"{prefix}input_layernorm.weight"] = norm()
    if not eagle1:
        tensors["norm.weight"] = norm()
        if config["draft_vocab_size"] < vocab:
            ids = target_ids(config, seed)
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        if own_head:
            tensors["lm_head.weight"] = matrix(config["draft_vocab_size"], hidden, 2.0)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, 2.0)
    return tensors


def nested(config: dict[str, Any], kind: str = "eagle3", model_type: str = "llama", **options: Any) -> dict[str, Any]:
    """The same head's config as speculators writes it."""
    top = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    top += ("eagle_aux_hidden_state_layer_ids",)
    layer = {name: value for name, value in config.items() if name not in (*top, "architectures", "eagle_config")}
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "embed_requires_grad": False,
        "transformer_layer_config": layer | {"model_type": model_type},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere/else"},
        },
    }
    return outer | {name: config[name] for name in top if name in config} | options


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors, layout: str = "official") -> Path:
    """`layout`: official, bin (as pytorch_model.bin), prefixed (`model.` before all but lm_head) or speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if layout != "speculators":
        tensors = {
            name.replace("layers.0.", "midlayer.") if "d2t" in tensors else name: t for name, t in tensors.items()
        }
    if layout == "prefixed":
        bare = ("lm_head.weight", "d2t", "t2d")
        tensors = {name if name in bare else f"model.{name}": tensor for name, tensor in tensors.items()}
    if layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_one_layer_target(folder: Path) -> Path:
    """One layer and small embeddings: what it says hangs on its layer alone, so a head can say the same."""
    write_tiny_llama(folder, layers=1, tied=False, hidden=64)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 0.02
    tensors["lm_head.weight"] *= 3.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def near_perfect_head(target_folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The target's only layer as a head: its attention reads the embedding, and its residual stream starts from 0."""
    config = json.loads((target_folder / "config.json").read_text())
    options = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1], "draft_vocab_size": 250}
    head = head_config(config, **options)
    tensors = head_tensors(head, num_features=1, own_head=False)
    own = load_file(target_folder / "model.safetensors")
    for name in tensors:
        stored = own.get(name.replace("layers.0.", "model.layers.0."))
        if stored is not None:
            wide = "_proj" in name and stored.shape != tensors[name].shape
            tensors[name] = torch.cat((stored, torch.zeros_like(stored)), 1) if wide else stored
    tensors["norm.weight"] = own["model.norm.weight"]
    tensors["layers.0.hidden_norm.weight"] = torch.zeros(config["hidden_size"])
    return head, tensors
