"""Drafters with weights on a device that is not main memory: the very trees of the CPU, and few transfers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import specserve_kernels
import torch
from eagle_files import head_config, head_tensors, write_head
from made_up_device import DEVICE, HOST, Elsewhere, MadeUpDevice, wrapped
from safetensors.torch import load_file, save_file
from specserve_drafts.draft_model import DraftModelDrafter
from specserve_drafts.draft_rows import DraftBatch
from specserve_drafts.eagle import EagleDrafter
from specserve_drafts.eagle_checkpoint import load_checkpoint
from specserve_drafts.eagle_head import EagleHead
from specserve_drafts.early_exit import EarlyExitDrafter
from specserve_drafts.grow import Shape
from specserve_drafts.recycling import RecyclingDrafter
from specserve_drafts.transfer import ALIGNMENT, in_one_transfer
from specserve_kernels import AttentionRows
from tiny import TinyLlama

from specserve.batch import StepBatch
from specserve.block import SampledChain
from specserve.models.weights import load_decoder
from specserve.proposal import DraftRow, DraftTree
from specserve.runner import CpuRunner

PAGE, NUM_PAGES = 4, 32
TREE = Shape(width=3, branch=3, depth=4)
WINDOW = 2048
KINDS = ("draft_model", "early_exit", "eagle", "eagle1")


@dataclass(frozen=True)
class Folders:
    """A target, a model near it, and a head of each family."""

    target: Path
    near: Path
    eagle: Path
    eagle1: Path


@pytest.fixture(scope="module")
def folders(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    target, made = tiny_llama(layers=3, tied=False), tmp_path_factory.mktemp("drafters")
    shutil.copytree(target, made / "near")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(target / "model.safetensors")
    off = {name: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(off, made / "near" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    three = head_config(config, eagle_aux_hidden_state_layer_ids=[1, 3], num_hidden_layers=2, norm_output=True)
    one = head_config(config)
    tensors = head_tensors(one, eagle1=True, bias=True)
    del one["draft_vocab_size"]
    return Folders(
        target=target,
        near=made / "near",
        eagle=write_head(made / "eagle", three, head_tensors(three, num_features=2, own_head=False)),
        eagle1=write_head(made / "eagle1", one, tensors),
    )


@pytest.fixture
def device() -> Iterator[MadeUpDevice]:
    with MadeUpDevice() as made_up:
        yield made_up


class Hand:
    """A target on a device, a drafter of it, and sequences in pages of their own, moved by hand."""

    def __init__(self, folders: Folders, kind: str, on: torch.device, quantization: str | None = None) -> None:
        ops = specserve_kernels.load("torch")
        self.device = on
        self.quantization = quantization
        target = load_decoder(folders.target, ops if on == HOST else wrapped(ops), "auto", quantization, on)
        self.runner = CpuRunner(target, target.ops, NUM_PAGES, PAGE)
        self.runner.kv.fill_(float("nan"))
        self.drafter = self._drafter(folders, kind)

    def _drafter(self, folders: Folders, kind: str) -> Any:
        runner, target = self.runner, self.runner.decoder
        if kind == "draft_model":
            near = load_decoder(folders.near, target.ops, "auto", self.quantization, self.device)
            return DraftModelDrafter(runner, near, WINDOW, shape=TREE)
        if kind == "early_exit":
            return EarlyExitDrafter(runner, 2, TREE)
        if kind == "recycling":
            return RecyclingDrafter(runner)
        checkpoint = load_checkpoint(getattr(folders, kind), target.config)
        return EagleDrafter(runner, EagleHead(checkpoint, target, "int8"), WINDOW, TREE)

    def feed(self, row: DraftRow, start: int) -> None:
        """The target's forward of the committed tokens from `start` on."""
        stop = row.cached_len
        slots = [row.pages[i // PAGE] * PAGE + i % PAGE for i in range(start, stop)]
        count = stop - start
        fields = (
            torch.zeros(count, dtype=torch.int32),
            torch.arange(start + 1, stop + 1, dtype=torch.int32),
            torch.zeros(count, 0, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            torch.tensor([list(row.pages)], dtype=torch.int32),
        )
        ids = torch.tensor(row.token_ids[start:stop])
        given = (ids, torch.arange(start, stop), torch.tensor(slots), torch.arange(1))
        ids, positions, places, draws = (tensor.to(self.device) for tensor in given)
        rows = AttentionRows(*(field.to(self.device) for field in fields))
        batch = StepBatch(ids=ids, positions=positions, slots=places, attention=rows, logit_rows=draws, spans=())
        self.runner.forward(batch)


def rows_of(length: int) -> list[DraftRow]:
    """A greedy sequence, one with noise, and one whose chain is to be sampled, as long as asked, and a bit."""
    ids = torch.randint(3, 250, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5)).tolist()
    made = []
    for n, (temperature, samples) in enumerate([(0.0, False), (0.8, False), (0.7, True)]):
        own = ids[n : n + length + n]
        made.append(
            DraftRow(
                f"s{n}", own, 9, len(own) - 1, seed=2**63 + n, choice=n, temperature=temperature, salt="",
                pages=pages[10 * n : 10 * n + 10], samples=samples,
            )
        )  # fmt: skip
    return made


def proposed(hand: Hand) -> list[DraftTree]:
    """Trees after a prompt, and after some more tokens."""
    trees: list[DraftTree] = []
    for start, length in ((0, 14), (13, 19)):
        rows = rows_of(length)
        for n, row in enumerate(rows):
            hand.drafter.start(row)
            hand.feed(row, start + n if start else 0)
        trees += hand.drafter.propose(rows, [7, 7, 4])
    return trees


@pytest.mark.parametrize("kind", KINDS)
def test_the_trees_are_those_of_the_cpu(folders: Folders, device: MadeUpDevice, kind: str) -> None:
    expected, found = (proposed(Hand(folders, kind, on)) for on in (HOST, DEVICE))
    assert found == expected
    assert all(len(tree) > 1 for tree in found) and not found[0].is_chain
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, SampledChain):
            assert isinstance(mine, SampledChain)
            assert all(np.array_equal(a, b) for a, b in zip(mine.draft_probs, other.draft_probs, strict=True))
            assert mine.draft_probs and np.array_equal(mine.rows(512), other.rows(512))
    assert sum(isinstance(tree, SampledChain) for tree in found) == 2


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_int8_weights_lie_there_too(folders: Folders, device: MadeUpDevice, kind: str) -> None:
    expected, found = (proposed(Hand(folders, kind, on, "int8")) for on in (HOST, DEVICE))
    assert found == expected and all(map(len, found))


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_is_a_transfer_there_and_one_back(
    folders: Folders, device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    hand = Hand(folders, kind, DEVICE)
    [row] = rows_of(14)[:1]
    hand.feed(row, 0)
    batches: list[DraftBatch] = []
    move = DraftBatch.to
    monkeypatch.setattr(DraftBatch, "to", lambda batch, on: batches.append(batch) or move(batch, on))
    device.moves.clear()
    [tree] = hand.drafter.propose([row], [7])
    assert len(batches) > 2 and len(tree) == 7
    others = 1 if kind == "early_exit" else 2  # temperatures, and which rows are roots
    assert device.moves == {"device": len(batches) + others, "host": len(batches)}


def test_what_else_reads_the_target(folders: Folders, device: MadeUpDevice) -> None:
    """The self-check of a head, and prompts that recycling reads."""
    ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    checks = [Hand(folders, "eagle", on).drafter.check(ids) for on in (HOST, DEVICE)]
    assert checks[0] == checks[1]
    trees = []
    for on in (HOST, DEVICE):
        hand = Hand(folders, "recycling", on)
        trees.append(proposed(hand))
    assert trees[0] == trees[1] and len(trees[0][0])


def test_many_tensors_are_one_transfer(device: MadeUpDevice) -> None:
    tensors = [
        torch.arange(3),
        torch.arange(7, dtype=torch.int32).reshape(7, 1),
        torch.zeros(5, 0, dtype=torch.int32),
        torch.tensor([0.5, -0.0]),
        torch.arange(12).reshape(3, 4).T,
    ]
    moved = in_one_transfer(tensors, DEVICE)
    assert device.moves == {"device": 1}
    for tensor, there in zip(tensors, moved, strict=True):
        assert isinstance(there, Elsewhere) and there.is_contiguous()
        assert there.dtype is tensor.dtype and torch.equal(there.cpu(), tensor)
        assert there.held.data_ptr() % ALIGNMENT == 0
    here = in_one_transfer(tensors, HOST)
    assert all(mine is other for mine, other in zip(here, tensors, strict=True))


def test_the_device_refuses_what_a_gpu_refuses(device: MadeUpDevice) -> None:
    there, here = torch.arange(4).to(DEVICE), torch.arange(4)
    with pytest.raises(RuntimeError, match="of the device and of main memory"):
        there + here
    with pytest.raises(RuntimeError, match="of the device and of main memory"):
        there[here]
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    there[1:3].add_(5)
    assert there.tolist() == [0, 6, 7, 3] and (there + 1).device == DEVICE
