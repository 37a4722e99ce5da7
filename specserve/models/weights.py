"""Loading a Hugging Face folder strictly: every tensor is one that the configuration asks for, in its shape.

Only safetensors are read; a pickle is a program, and no folder gets to run one here. Anything missing,
unexpected, wrong-shaped, wrong-typed, truncated or corrupt is refused before the first tensor is copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from specserve_kernels.ops import Ops
from torch import Tensor

from specserve.errors import ModelError, WeightsError
from specserve.models.decoder import Decoder, DecoderConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
FILE_DTYPES = ("BF16", "F16", "F32")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_decoder(
    folder: Path, ops: Ops, dtype: str = "auto", quantization: str | None = None, device: torch.device | None = None
) -> Decoder:
    """Read config and weights of a folder and lay them out for one backend.

    Args:
        dtype: "bfloat16", "float32", or "auto": fp32 if every stored tensor is fp32, else bf16.
        quantization: "int8": matrices, embedding and head become int8 as they are loaded; None: no change.
        device: where the weights go; None: main memory.

    Raises:
        ModelError: the configuration is not one the decoder computes.
        WeightsError: the tensors are not those of the configuration; names tensor, found and expected.
    """
    config = DecoderConfig.from_folder(folder)
    tensors = load_weights(folder, config, dtype)
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Decoder(config, tensors, ops, quantization)


def load_weights(folder: Path, config: DecoderConfig, dtype: str = "auto") -> dict[str, Tensor]:
    """Exactly the tensors of `config.tensor_shapes()`, all in one dtype (see `load_decoder`).

    Raises:
        WeightsError: as for `load_decoder`.
    """
    stored = read_headers(folder)
    _check_names(folder, config, stored)
    shapes = config.tensor_shapes()
    for name, shape in shapes.items():
        _check_tensor(name, shape, stored[name])
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied_head(stored)
    wanted = _target_dtype(dtype, [stored[name] for name in shapes])
    return read_tensors({name: stored[name] for name in shapes}, wanted)


def _target_dtype(dtype: str, stored: list[StoredTensor]) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if all(entry.dtype == "F32" for entry in stored) else torch.bfloat16
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """What a folder's safetensors hold, by name, without reading a tensor.

    Raises:
        WeightsError: there are none, they are truncated or corrupt, or their index does not fit them.
    """
    stored: dict[str, StoredTensor] = {}
    for file, listed in _weight_files(folder).items():
        found = _read_header(file)
        if listed is not None and listed != set(found):
            name = min(listed ^ set(found))
            where = "lists it but the file lacks it" if name in listed else "does not list it but the file has it"
            raise WeightsError(f"{file.name}: tensor {name}: {INDEX_FILE} {where}")
        stored |= found
    return stored


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the tensor names that the index lists for it (None without an index)."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.is_file():
        raise WeightsError(_no_weights(folder))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} is not a safetensors index with a weight_map: {error!r}") from None
    files: dict[Path, set[str] | None] = {}
    for name, file in entries:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index.name} places {name} in {file!r}; it must be a .safetensors file of this folder")
        if not (folder / file).is_file():
            raise WeightsError(f"{index.name} places {name} in {file}, which is not in {folder}; fetch that shard")
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    return files


def _no_weights(folder: Path) -> str:
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        return (
            f"{folder} has only {pickles[0]}, a pickle; loading one can run code, so only safetensors are read."
            f" Convert it once with transformers: save_pretrained writes {SINGLE_FILE}"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            found = {}
            for name in reader.keys():  # noqa: SIM118  (not a dict)
                view = reader.get_slice(name)
                found[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
            return found
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file} cannot be read: {error}; the file is truncated or corrupt, fetch it again"
        ) from None


def _check_names(folder: Path, config: DecoderConfig, stored: Mapping[str, StoredTensor]) -> None:
    expected = config.tensor_shapes()
    missing = [name for name in expected if name not in stored]
    if missing:
        hint = " (config.json: tie_word_embeddings is false)" if missing == [HEAD] else ""
        raise WeightsError(f"{folder}: {_listed(missing)} missing{hint}")
    unexpected = [
        name
        for name in sorted(set(stored) - set(expected))
        if not name.endswith("rotary_emb.inv_freq") and not (config.tie_word_embeddings and name == HEAD)
    ]
    if unexpected:
        raise WeightsError(
            f"{folder}: {_listed(unexpected)} unexpected: config.json asks for {config.num_hidden_layers} Llama layers"
            " without biases"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "are" if len(names) > 1 else "is"
    return f"tensor {', '.join(names[:3])}{more} {verb}"


def _check_tensor(name: str, shape: tuple[int, ...], entry: StoredTensor) -> None:
    if entry.shape != shape:
        raise WeightsError(
            f"tensor {name} in {entry.file.name} has shape {list(entry.shape)}; config.json expects {list(shape)}"
        )
    if entry.dtype not in FILE_DTYPES:
        raise WeightsError(
            f"tensor {name} in {entry.file.name} has type {entry.dtype}; allowed: {', '.join(FILE_DTYPES)}"
        )


def _check_tied_head(stored: Mapping[str, StoredTensor]) -> None:
    """A file may repeat the tied head; if it differs, one of config and file is wrong and we cannot know which."""
    entries = {name: stored[name] for name in (HEAD, EMBEDDING)}
    if entries[HEAD].dtype == entries[EMBEDDING].dtype:
        tensors = read_tensors(entries, None)
        if torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            return
    raise WeightsError(
        f"tensor {HEAD} differs from {EMBEDDING}, but config.json says tie_word_embeddings; set it to false"
        " if the head is its own"
    )


def read_tensors(entries: Mapping[str, StoredTensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies in memory of our own, file by file: a mapped file that changes later cannot change a weight.

    `dtype` None: each as it is stored.
    """
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        try:
            with safe_open(file, framework="pt") as reader:
                for name, entry in entries.items():
                    if entry.file == file:
                        tensors[name] = reader.get_tensor(name).to(dtype=dtype, copy=True).contiguous()
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {error}") from None
    return tensors
