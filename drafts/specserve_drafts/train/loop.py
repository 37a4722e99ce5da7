"""The training loop on `accelerate`: AdamW over the training-time test, a checkpoint every few minutes, exact resume.

A step is one pack. Masters are fp32; the bf16 weights that compute are cast from them once a step. A checkpoint holds
model, optimizer, schedule and step; its folder has its name only when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from specserve_drafts.train.dataset import Entry, Shards, load_pack
from specserve_drafts.train.head import DraftHead, Pack
from specserve_drafts.train.loss import SoftCrossEntropy

PREFIX = "checkpoint-"
STATE = "step.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The recipe; docs/training.md says what was measured of it."""

    epochs: int = 3
    pack_queries: int = 1024
    num_steps: int = 5  # of the training-time test
    learning_rate: float = 1e-3
    warmup_steps: int = 60
    final_share: float = 0.02  # of the learning rate, at the end of the cosine
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """Tensors that training reads and never changes."""

    embed: Tensor  # [vocab, hidden]
    lm_head: Tensor  # [draft vocabulary, hidden]
    vocabulary_mask: Tensor  # bool [vocab]
    scales: Tensor  # fp32 [3 * hidden], what features are divided by


Checkpointed = Callable[[int], object]
"""Called after each checkpoint with the number of steps done."""


def train(
    head: DraftHead,
    shards: Shards,
    packs: list[list[Entry]],
    frozen: Frozen,
    config: TrainConfig,
    folder: Path,
    on_checkpoint: Checkpointed | None = None,
    stop_after: int | None = None,
) -> list[float]:
    """Train `head` in place over all packs, from the last checkpoint in `folder` if there is one.

    `stop_after`: end after so many steps in all, as a kill would, with a checkpoint. Returns this call's losses.
    """
    accelerator = Accelerator(cpu=True, mixed_precision="no")  # packs and frozen tensors live on the CPU
    optimizer, schedule = _optimizer(head, len(packs), config)
    model, optimizer, schedule = accelerator.prepare(head, optimizer, schedule)
    step = _resume(accelerator, folder)
    end = len(packs) if stop_after is None else min(stop_after, len(packs))
    losses: list[float] = []
    saved = time.monotonic()
    with tqdm(total=len(packs), initial=step, desc="training", unit="step", dynamic_ncols=True) as bar:
        for pack in _prefetched(shards, packs[step:end], frozen, config):
            loss = pack_loss(model, pack, frozen, config.num_steps)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
            if step == end or time.monotonic() - saved > config.checkpoint_seconds:
                save_checkpoint(accelerator, folder, step)
                saved = time.monotonic()
                if on_checkpoint is not None:
                    on_checkpoint(step)
    return losses


def pack_loss(head: torch.nn.Module, pack: Pack, frozen: Frozen, num_steps: int) -> Tensor:
    """The weighted loss of all steps of the training-time test."""
    outputs = head(pack, frozen.embed, num_steps)
    hidden = outputs[0].shape[-1]
    loss: Tensor = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        torch.cat(outputs), pack.targets.reshape(-1, hidden), pack.weights.reshape(-1), frozen.lm_head
    )
    return loss


def _prefetched(shards: Shards, packs: list[list[Entry]], frozen: Frozen, config: TrainConfig) -> Iterator[Pack]:
    """Packs in order, each read from disk while those before it are trained on."""

    def load(entries: list[Entry]) -> Pack:
        pack = load_pack(shards, entries, frozen.vocabulary_mask, config.num_steps)
        return scaled(pack, frozen.scales)

    with ThreadPoolExecutor(max_workers=1) as reader:
        coming = deque(reader.submit(load, entries) for entries in packs[:2])
        for index in range(len(packs)):
            pack = coming.popleft().result()
            if index + 2 < len(packs):
                coming.append(reader.submit(load, packs[index + 2]))
            yield pack


def scaled(pack: Pack, scales: Tensor) -> Pack:
    """The pack with its features divided by their scales."""
    pack.features.div_(scales.to(pack.features.dtype))
    return pack


def _optimizer(head: DraftHead, total: int, config: TrainConfig) -> tuple[AdamW, LambdaLR]:
    optimizer = AdamW(head.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0, foreach=True)
    return optimizer, LambdaLR(optimizer, lambda step: _rate(step, total, config))


def _rate(step: int, total: int, config: TrainConfig) -> float:
    """Share of the learning rate: linear warm-up, then a cosine down to `final_share`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    return config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write checkpoint-<step>, then drop the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    accelerator.save_state(str(temporary))
    (temporary / STATE).write_text(json.dumps({"step": step}), encoding="utf-8")
    final = folder / f"{PREFIX}{step:07d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for older in folder.glob(f"{PREFIX}*"):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)


def _resume(accelerator: Accelerator, folder: Path) -> int:
    """Load the newest checkpoint; returns its step, 0 where there is none."""
    found = sorted(folder.glob(f"{PREFIX}*"))
    if not found:
        return 0
    accelerator.load_state(str(found[-1]))
    return int(json.loads((found[-1] / STATE).read_text(encoding="utf-8"))["step"])
