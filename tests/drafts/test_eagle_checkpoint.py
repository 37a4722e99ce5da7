"""Every layout of an EAGLE head gives the record that its numbers mean; every way to be wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specserve_kernels
import torch
from eagle_files import Tensors, head_config, head_tensors, nested, target_ids, write_head
from safetensors.torch import save_file
from specserve_drafts.eagle_checkpoint import HeadCheckpoint, load_checkpoint, read_fingerprint
from tiny import TinyLlama, tiny_config

from specserve.errors import ModelError, ModelNotFound, WeightsError
from specserve.models.decoder import DecoderConfig
from specserve.models.weights import load_decoder

TARGET = tiny_config(300, layers=8)
FC = "fc.weight"


def load(folder: Path, target: dict[str, Any] = TARGET) -> HeadCheckpoint:
    return load_checkpoint(folder, DecoderConfig.from_dict(target))


@pytest.mark.parametrize("layout", ["official", "bin", "prefixed", "speculators"])
def test_layouts_give_the_same_record(tmp_path: Path, layout: str) -> None:
    config = head_config(TARGET, norm_before_residual=True)
    tensors = head_tensors(config)
    written = nested(config) if layout == "speculators" else config
    found = load(write_head(tmp_path, written, tensors, layout))
    assert found.config.family == "EAGLE-3"
    assert found.config.feature_layers == (1, 3, 4)  # the inputs of 2, L/2 and L-3 are outputs of the layers before
    assert found.config.norm_before_residual
    assert not found.config.feeds_back_norm
    assert found.config.body.rope_theta == 10000.0
    assert found.config.draft_vocab_size == 96
    assert found.target_ids is not None
    assert torch.equal(found.target_ids, target_ids(config))
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    assert found.fingerprint is None


def test_rope_of_the_head_not_of_the_target(tmp_path: Path) -> None:
    target = TARGET | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    config = head_config(target)
    assert load(write_head(tmp_path / "a", config, head_tensors(config)), target).config.body.rope_theta == 10000.0
    config = head_config(target, rope_theta=25000.0)
    assert load(write_head(tmp_path / "b", config, head_tensors(config)), target).config.body.rope_theta == 25000.0


def test_options_of_speculators(tmp_path: Path) -> None:
    """Deeper, Qwen3, one norm over all features, its own output fed back normed, the whole vocabulary."""
    config = head_config(
        TARGET, num_hidden_layers=2, norm_before_fc=True, norm_output=True, draft_vocab_size=300, head_dim=16
    ) | {"eagle_aux_hidden_state_layer_ids": [1, 4, 6, 8]}
    tensors = head_tensors(config, num_features=4, qk_norm=True)
    assert "d2t" not in tensors
    found = load(write_head(tmp_path, nested(config, model_type="qwen3"), tensors, "speculators"))
    assert found.config.feature_layers == (0, 3, 5, 7)
    assert found.config.body.num_hidden_layers == 2
    assert (found.config.feature_norm, found.config.feeds_back_norm, found.config.qk_norm) == ("whole", True, True)
    assert found.target_ids is None


@pytest.mark.parametrize(("ids", "outputs"), [([1, 3, 4], (1, 3, 4)), ([2, 4, 5], (1, 3, 4))])
def test_both_conventions_of_layer_ids_in_eagle_config(
    tmp_path: Path, ids: list[int], outputs: tuple[int, ...]
) -> None:
    """A list that begins with 1 names outputs, as SpecForge writes it; any other names inputs."""
    config = head_config(TARGET, eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids})
    found = load(write_head(tmp_path, config, head_tensors(config)))
    assert found.config.feature_layers == outputs


def test_top_level_layer_ids_are_inputs(tmp_path: Path) -> None:
    config = head_config(TARGET, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    assert load(write_head(tmp_path, config, head_tensors(config))).config.feature_layers == (0, 2, 3)


def test_no_auxiliary_states(tmp_path: Path) -> None:
    """`use_aux_hidden_state` false: the last hidden state, as it is."""
    config = head_config(TARGET, eagle_config={"use_aux_hidden_state": False})
    tensors = head_tensors(config)
    del tensors[FC]
    found = load(write_head(tmp_path, config, tensors))
    assert (found.config.family, found.config.feature_layers, found.config.fuses) == ("EAGLE-3", (), False)


def test_one_norm_a_feature_and_a_narrower_head(tmp_path: Path) -> None:
    config = head_config(TARGET, fc_norm=True, hidden_size=16, target_hidden_size=32)
    tensors = head_tensors(config, own_embedding=True)
    found = load(write_head(tmp_path, config, tensors))
    assert found.config.feature_norm == "each"
    assert found.tensors["fc_norm.2.weight"].shape == (32,)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        lacking = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(WeightsError, match=rf"{name} is missing, and the target's has 32 columns instead of 16"):
            load(write_head(tmp_path / name, config, lacking))


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1(tmp_path: Path, bias: bool) -> None:
    config = head_config(TARGET)
    del config["draft_vocab_size"]
    tensors = head_tensors(config | {"draft_vocab_size": 300}, eagle1=True, bias=bias, own_head=False)
    found = load(write_head(tmp_path, config, tensors))
    assert (found.config.family, found.config.feature_layers) == ("EAGLE-1/2", ())
    assert found.config.fc_bias == bias
    with pytest.raises(WeightsError, match=r"fc\.bias is .*there; config\.json: bias is"):
        load(write_head(tmp_path, config | {"bias": not bias}, tensors))


OTHER_KINDS: dict[str, tuple[Callable[[dict[str, Any], Tensors], object], str]] = {
    "peagle": (lambda c, t: c.update(nested(c, "peagle")), r"P-EAGLE head \(parallel drafting\)"),
    "peagle_by_tensor": (lambda c, t: t.update(mask_hidden=torch.ones(1, 96)), r"P-EAGLE head \(parallel drafting\)"),
    "dflash": (lambda c, t: c.update(architectures=["DFlashDraftModel"], block_size=16), r"DFlash block drafter"),
    "dflash_speculators": (lambda c, t: c.update(nested(c, "dflash")), r"DFlash block drafter"),
    "dspark": (lambda c, t: c.update(nested(c, "dspark")), r"DSpark block drafter"),
    "dspark_flat": (lambda c, t: c.update(markov_rank=256, block_size=5), r"DSpark block drafter"),
    "mtp": (lambda c, t: c.update(nested(c, "mtp")), r"multi-token-prediction \(MTP\) layer"),
    "mtp_config": (lambda c, t: c.update(num_nextn_predict_layers=1), r"multi-token-prediction \(MTP\) layer"),
    "mtp_deepseek": (
        lambda c, t: t.update({"model.layers.61.eh_proj.weight": torch.ones(2, 4)}),
        r"multi-token-prediction \(MTP\) layer",
    ),
    "mtp_qwen": (lambda c, t: t.update({"mtp.fc.weight": torch.ones(2, 4)}), r"multi-token-prediction \(MTP\) layer"),
    "unknown": (lambda c, t: c.update(nested(c, "medusa9")), r"speculators model of type 'medusa9'"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_are_told_apart(tmp_path: Path, kind: str) -> None:
    change, expected = OTHER_KINDS[kind]
    config = head_config(TARGET)
    tensors = head_tensors(config)
    change(config, tensors)
    with pytest.raises(ModelError, match=rf"holds a {expected}; supported: EAGLE-1/2 and EAGLE-3 heads"):
        load(write_head(tmp_path, config, tensors))


SPOILED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "vocab": ({"vocab_size": 301}, r"vocab_size is 301; the target has 300"),
    "target_hidden_size": ({"target_hidden_size": 64}, r"hidden states of 64 values; the target's have 32"),
    "too_large_draft_vocabulary": ({"draft_vocab_size": 301}, r"draft_vocab_size is 301, vocab_size only 300"),
    "draft_vocabulary_type": ({"draft_vocab_size": "96"}, r"draft_vocab_size is '96'; it must be an integer"),
    "flag_type": ({"norm_before_residual": 1}, r"norm_before_residual is 1; it must be true or false"),
    "both_norms": ({"norm_before_fc": True, "fc_norm": True}, r"norm_before_fc and fc_norm exclude each other"),
    "architecture": ({"architectures": ["Qwen2ForCausalLM"]}, r"'Qwen2ForCausalLM'.*supported: Llama layers"),
    "model_type": ({"model_type": "deepseek_v3"}, r"of type 'deepseek_v3'.*supported: Llama layers"),
    "attention_bias": ({"attention_bias": True}, r"attention_bias is True; supported: false"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope type is 'yarn'; supported"),
    "layers_type": ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, r"is '2,4,5'; it must be a list of layers"),
    "layers_order": ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, r"inputs of layers \[4, 2, 5\].*must ascend"),
    "layers_range": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"from 1 to at most 8"),
    "embedding_as_feature": ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, r"must ascend from 1"),
    "eagle_config": ({"eagle_config": [2, 4, 5]}, r"eagle_config is \[2, 4, 5\]; it must be a JSON object"),
    "heads": ({"num_attention_heads": 3}, r"num_attention_heads 3 is no multiple of num_key_value_heads 2"),
}


@pytest.mark.parametrize("case", SPOILED_CONFIGS)
def test_configs_that_make_no_sense(tmp_path: Path, case: str) -> None:
    change, expected = SPOILED_CONFIGS[case]
    config = head_config(TARGET)
    with pytest.raises(ModelError, match=expected):
        load(write_head(tmp_path, config | change, head_tensors(config)))


def test_default_features_need_seven_layers(tmp_path: Path) -> None:
    target = tiny_config(300, layers=2)
    config = head_config(target)
    with pytest.raises(ModelError, match=r"inputs of layers \[2, 1, -1\].*at most 2"):
        load(write_head(tmp_path, config, head_tensors(config)), target)


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


K_PROJ = "layers.0.self_attn.k_proj.weight"
SPOILED_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(K_PROJ), rf"tensor {K_PROJ} is missing, expected \[16, 64\]"),
    "shape": (
        spoil(FC, lambda w: w[:, :64].contiguous()),
        r"fc\.weight .*shape \[32, 64\]; config.json expects \[32, 96\]",
    ),
    "type": (spoil(FC, lambda w: w.to(torch.int8)), r"fc\.weight .*has type I8; allowed: BF16, F16, F32"),
    "not_finite": (spoil(FC, lambda w: w * torch.inf), r"tensor fc\.weight holds values that are not finite"),
    "unexpected": (
        lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(1)}),
        r"layers\.1\.mlp\.up_proj.* unexpect",
    ),
    "bias": (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.ones(32)}), r"q_proj\.bias is unexpected"),
    "norm_without_option": (
        lambda t: t.update({"input_norm.weight": torch.ones(96)}),
        r"input_norm\.weight is unexpected",
    ),
    "d2t_missing": (lambda t: t.pop("d2t"), r"tensor d2t is missing; expected \[96\], as draft_vocab_size is 96"),
    "d2t_type": (spoil("d2t", lambda d: d.float()), r"tensor d2t .*has type F32; allowed: I64, I32"),
    "d2t_outside": (spoil("d2t", lambda d: d + 1000), r"d2t: draft id 0 stands for \d+; the vocabulary has 300"),
    "d2t_negative": (spoil("d2t", lambda d: d - 1000), r"d2t: draft id 0 stands for -\d+; the vocabulary has 300"),
    "d2t_twice": (spoil("d2t", lambda d: -torch.arange(96)), r"two draft ids stand for the same id"),
    "t2d_differs": (spoil("t2d", lambda t: t.roll(1)), r"tensors d2t and t2d name different ids"),
    "twice": (lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.ones(1)}), r"are one and the same"),
}


@pytest.mark.parametrize("case", SPOILED_TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, case: str) -> None:
    change, expected = SPOILED_TENSORS[case]
    config = head_config(TARGET)
    tensors = head_tensors(config)
    change(tensors)
    with pytest.raises(WeightsError, match=expected):
        load(write_head(tmp_path, nested(config), tensors, "speculators"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([1, 2], r"holds a list; it must be a dictionary of tensors"),
        ({FC: "text"}, r"'fc\.weight' is a str; it must be a plain tensor"),
        ({FC: torch.ones(2, 2).to_sparse()}, r"'fc\.weight' is a Tensor; it must be a plain tensor"),
        (Path("/etc"), r"cannot be read: UnpicklingError"),  # any class but a tensor's could run code
    ],
)
def test_bin_files_hold_tensors_only(tmp_path: Path, content: Any, expected: str) -> None:
    config = head_config(TARGET)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=expected):
        load(tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    config = head_config(TARGET)
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"holds a list; it must be a JSON object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04garbage")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin cannot be read"):
        load(tmp_path)
    save_file(head_tensors(config), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match=r"truncated or corrupt"):
        load(tmp_path)


def test_fingerprint_is_the_models_not_the_files(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    ops = specserve_kernels.load("auto")
    folder = tiny_llama()
    found = {
        load_decoder(folder, ops, dtype, quantization).fingerprint
        for dtype, quantization in (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))
    }
    assert len(found) == 1
    other = load_decoder(tiny_llama(seed=1), ops).fingerprint
    assert other not in found
    (tmp_path / "provenance.json").write_text(json.dumps({"target_fingerprint": other}))
    assert read_fingerprint(tmp_path) == other
    (tmp_path / "provenance.json").write_text(json.dumps({"target_fingerprint": 7}))
    with pytest.raises(ModelError, match=r"target_fingerprint is 7; it must be a string"):
        read_fingerprint(tmp_path)


def test_a_tuned_last_layer_is_another_model(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Merged adapters leave embedding and norms as they were."""
    import shutil

    from safetensors.torch import load_file

    folder = tmp_path / "tuned"
    shutil.copytree(tiny_llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors")
    ops = specserve_kernels.load("auto")
    assert load_decoder(folder, ops).fingerprint != load_decoder(tiny_llama(), ops).fingerprint
