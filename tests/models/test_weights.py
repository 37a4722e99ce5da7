"""Loading is strict: each way a folder can be wrong is refused, naming the tensor, what was found and expected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TinyLlama
from torch import Tensor

from specserve.errors import ModelError, WeightsError
from specserve.models.decoder import DecoderConfig
from specserve.models.weights import load_weights

Tensors = dict[str, Tensor]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
EMBED = "model.embed_tokens.weight"


def load(folder: Path, dtype: str = "auto") -> Tensors:
    return load_weights(folder, DecoderConfig.from_folder(folder), dtype)


@pytest.fixture
def copy_of(tiny_llama: TinyLlama, tmp_path: Path) -> Callable[..., Path]:
    """A tiny folder that the test may spoil; `change` edits its tensors."""

    def make(change: Callable[[Tensors], object] = lambda tensors: None, **options: object) -> Path:
        target = tmp_path / "model"
        shutil.copytree(tiny_llama(**options), target)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors")
        return target

    return make


def shard(folder: Path) -> dict[str, str]:
    """Split model.safetensors into two shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_single_file_and_shards_give_the_same_tensors(copy_of: Callable[..., Path]) -> None:
    folder = copy_of(tied=False)
    stored, whole = load_file(folder / "model.safetensors"), load(folder)
    shard(folder)
    sharded = load(folder)
    assert set(whole) == set(sharded) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(whole[name], tensor)
        assert torch.equal(sharded[name], tensor)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(copy_of: Callable[..., Path], stored: torch.dtype, asked: str, expected: torch.dtype) -> None:
    folder = copy_of(dtype=stored)
    tensors = load(folder, asked)
    assert {tensor.dtype for tensor in tensors.values()} == {expected}
    assert torch.equal(tensors[K_PROJ], load_file(folder / "model.safetensors")[K_PROJ].to(expected))


def test_unknown_dtype_is_refused(copy_of: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="dtype is 'int8'; allowed: auto, bfloat16, float32"):
        load(copy_of(), "int8")


def test_weights_are_copies_of_the_file(copy_of: Callable[..., Path]) -> None:
    folder = copy_of()
    tensors = load(folder)
    before = tensors[EMBED].clone()
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(tensors[EMBED], before)


SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(K_PROJ), rf"{K_PROJ} is missing"),
    "many_missing": (
        lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name],
        r"and 6 more are missing",
    ),
    "unexpected": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}),
        r"model\.layers\.2\.mlp\.up_proj\.weight is unexpected.*2 Llama layers",
    ),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        r"q_proj\.bias is unexpected.*without biases",
    ),
    "shape": (
        lambda t: t.update({K_PROJ: t[K_PROJ][:8].clone()}),
        rf"{K_PROJ} .*has shape \[8, 32\]; config\.json expects \[16, 32\]",
    ),
    "type": (
        lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)}),
        rf"{K_PROJ} .*has type I8; allowed: BF16, F16, F32",
    ),
    "double": (lambda t: t.update({K_PROJ: t[K_PROJ].double()}), "has type F64"),
    "other_head": (lambda t: t.update({"lm_head.weight": t[EMBED] + 1}), r"lm_head\.weight differs from"),
    "half_head": (lambda t: t.update({"lm_head.weight": t[EMBED].half()}), r"lm_head\.weight differs from"),
}


@pytest.mark.parametrize("case", list(SPOILED))
def test_wrong_tensors_are_refused(copy_of: Callable[..., Path], case: str) -> None:
    change, message = SPOILED[case]
    with pytest.raises(WeightsError, match=message):
        load(copy_of(change))


def test_missing_untied_head_names_the_config(copy_of: Callable[..., Path]) -> None:
    with pytest.raises(WeightsError, match=r"lm_head\.weight is missing.*tie_word_embeddings is false"):
        load(copy_of(lambda t: t.pop("lm_head.weight"), tied=False))


def test_repeated_tied_head_and_rotary_buffers_are_ignored(copy_of: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[EMBED].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert "lm_head.weight" not in load(copy_of(change))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_files_are_refused(copy_of: Callable[..., Path], keep: float) -> None:
    folder = copy_of()
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read.*truncated or corrupt"):
        load(folder)


def test_corrupt_header_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of()
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\x00" * 32
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="truncated or corrupt"):
        load(folder)


def test_pickles_are_refused_with_a_reason(copy_of: Callable[..., Path]) -> None:
    folder = copy_of()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_shards_that_do_not_fit_their_index_are_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of()
    weight_map = shard(folder)
    first, second = sorted(set(weight_map.values()))

    write_index(folder, {**weight_map, "ghost": first})
    with pytest.raises(WeightsError, match=r"ghost: .*lists it but the file lacks it"):
        load(folder)
    write_index(folder, {name: file for name, file in weight_map.items() if name != EMBED})
    with pytest.raises(WeightsError, match=rf"{EMBED}: .*does not list it"):
        load(folder)
    for bad in ("../model.safetensors", "/etc/passwd", "weights.bin"):
        write_index(folder, {**weight_map, EMBED: bad})
        with pytest.raises(WeightsError, match=r"must be a \.safetensors file of this folder"):
            load(folder)
    for bad_index in ([], None, "x"):
        write_index(folder, bad_index)
        with pytest.raises(WeightsError, match="not a safetensors index"):
            load(folder)

    doubled = load_file(folder / second) | load_file(folder / first)
    save_file(doubled, folder / second)
    write_index(folder, weight_map)
    with pytest.raises(WeightsError, match="does not list it but the file has it"):
        load(folder)
    (folder / second).unlink()
    write_index(folder, weight_map)
    with pytest.raises(WeightsError, match=rf"{second}, which is not in .*; fetch that shard"):
        load(folder)
