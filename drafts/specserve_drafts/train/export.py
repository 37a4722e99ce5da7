"""A trained head as files: the public EAGLE-3 names, a config, where it comes from.

Ours leaves out `lm_head.weight`: the draft head is the rows of the target's head that `d2t` names. A public export
writes it, for engines that look for one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.models.decoder import DecoderConfig
from specserve_drafts.train.dataset import DraftVocabulary
from specserve_drafts.train.features import auxiliary_layers
from specserve_drafts.train.head import DraftHead, HeadConfig

NAMES = {
    "fc": "fc",
    "q_proj": "midlayer.self_attn.q_proj",
    "k_proj": "midlayer.self_attn.k_proj",
    "v_proj": "midlayer.self_attn.v_proj",
    "o_proj": "midlayer.self_attn.o_proj",
    "gate_proj": "midlayer.mlp.gate_proj",
    "up_proj": "midlayer.mlp.up_proj",
    "down_proj": "midlayer.mlp.down_proj",
    "input_layernorm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
    "post_attention_layernorm": "midlayer.post_attention_layernorm",
    "norm": "norm",
}


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """What a head shares with its target, and must find again where it is used."""

    config: DecoderConfig
    embed: Tensor  # [vocab, hidden]
    lm_head: Tensor  # [vocab, hidden]
    norm: Tensor  # [hidden]
    fingerprint: str  # of the whole target, as its decoder has it

    def head_config(self, draft_vocab_size: int) -> HeadConfig:
        """A head with the target's own sizes."""
        config = self.config
        return HeadConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            draft_vocab_size=min(draft_vocab_size, config.vocab_size),
            rms_norm_eps=config.rms_norm_eps,
        )


def head_tensors(head: DraftHead, vocabulary: DraftVocabulary, scales: Tensor) -> dict[str, Tensor]:
    """All tensors but the output head, in bf16; fc takes unscaled features."""
    weights = {name: parameter.detach() for name, parameter in head.named_parameters()}
    weights["fc.weight"] = weights["fc.weight"] / scales
    tensors = {f"{public}.weight": weights[f"{name}.weight"].to(torch.bfloat16) for name, public in NAMES.items()}
    tensors["d2t"] = vocabulary.ids - torch.arange(vocabulary.ids.shape[0])
    tensors["t2d"] = vocabulary.mask()
    return tensors


def load_tensors(head: DraftHead, tensors: Mapping[str, Tensor], scales: Tensor) -> None:
    """The inverse of `head_tensors`, to rounding."""
    for name, public in NAMES.items():
        weight = tensors[f"{public}.weight"].float()
        head.get_parameter(f"{name}.weight").data.copy_(weight * scales if name == "fc" else weight)


def config_json(config: HeadConfig, target: DecoderConfig) -> dict[str, Any]:
    """The flat Llama config of the public format."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(auxiliary_layers(target.num_hidden_layers)),
        },
    }


def export(
    folder: Path,
    head: DraftHead,
    vocabulary: DraftVocabulary,
    scales: Tensor,
    target: FrozenTarget,
    provenance: Mapping[str, Any],
    *,
    public: bool = False,
) -> None:
    """Write model.safetensors, config.json and provenance.json; `public` writes lm_head.weight as well."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = head_tensors(head, vocabulary, scales)
    if public:
        tensors["lm_head.weight"] = target.lm_head[vocabulary.ids].to(torch.bfloat16)
    config = config_json(head.config, target.config)
    texts = {"config.json": config, "provenance.json": {**provenance, "target_fingerprint": target.fingerprint}}
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary = folder / "model.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")
