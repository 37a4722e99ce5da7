"""From prompts to a head: the stages in order, each in its own folder under `out`, each continuing what it finds.

answers/<prompts>/  features/<prompts>/  checkpoints/  head/ (the export), all remade only where missing
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import specserve_kernels
import torch
from safetensors.torch import load_file

from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.models.decoder import DecoderConfig, fingerprint
from specserve.models.hub import resolve_model
from specserve.models.weights import EMBEDDING, HEAD, load_decoder, load_weights
from specserve_drafts.train.answers import (
    AnswerConfig,
    Progress,
    balanced_mix,
    generate_answers,
    read_answers,
    read_training_prompts,
)
from specserve_drafts.train.dataset import DraftVocabulary, Entry, Shards, plan_packs, write_targets
from specserve_drafts.train.evaluate import Acceptance, evaluate
from specserve_drafts.train.export import FrozenTarget, export, load_tensors
from specserve_drafts.train.features import FeatureConfig, extract_shards
from specserve_drafts.train.head import DraftHead
from specserve_drafts.train.initial import feature_scales, initialize
from specserve_drafts.train.loop import Frozen, TrainConfig, train
from specserve_drafts.train.successors import make_successors, write_successors

HELD_OUT_LIMIT = 100  # answers that a head is judged by at each checkpoint: some seconds
ELAPSED = "seconds.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """All that decides what the head will be; `quantization` is of the engine that answers."""

    model: str
    prompts: tuple[Path, ...]
    max_prompts: int | None = None  # of each file
    max_num_seqs: int = 64
    quantization: str | None = None
    draft_vocab_size: int = 16384
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    training: TrainConfig = field(default_factory=TrainConfig)
    start_from: Path | None = None  # a head that was exported; None: the closed-form start
    public: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that the loop needs, in memory or on disk."""

    target: FrozenTarget
    shards: Shards
    train: list[Entry]
    held_out: list[Entry]
    vocabulary: DraftVocabulary
    frozen: Frozen


def run(config: PipelineConfig, out: Path, until: str = "head", progress: Progress | None = None) -> Acceptance | None:
    """Run the stages up to `until` (answers, features or head). Returns the head's acceptance on held-out answers.

    Raises:
        ConfigError: prompts cannot be read, or the folder holds a run of other options.
    """
    started = time.monotonic()
    answer(config, out, progress)
    if until != "answers":
        paths = make_features(config, out, progress)
    _add_seconds(out, "preparing", time.monotonic() - started)
    if until != "head":
        return None
    prepared = prepare(config, out, paths, progress)
    answers = [out / "answers" / folder_name(path) for path in config.prompts]
    return fit(config, out, prepared, answers)


def answer(config: PipelineConfig, out: Path, progress: Progress | None = None) -> None:
    """Stage 1, for every file of prompts."""
    options: dict[str, Any] = {} if config.quantization is None else {"quantization": config.quantization}
    llm = LLM(
        config.model,
        "off",
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=1024,
        max_num_queued_requests=max(1024, config.answers.shard_size),
        **options,
    )
    for path in config.prompts:
        mix = balanced_mix(read_training_prompts(path), config.answers.seed)[: config.max_prompts]
        generate_answers(llm, mix, out / "answers" / folder_name(path), config.answers, progress)


def make_features(config: PipelineConfig, out: Path, progress: Progress | None = None) -> list[Path]:
    """Stage 2, for every file of prompts; all shards in order."""
    decoder = load_decoder(resolve_model(config.model), specserve_kernels.load())
    paths: list[Path] = []
    for prompts in config.prompts:
        name = folder_name(prompts)
        paths += extract_shards(decoder, out / "answers" / name, out / "features" / name, config.features, progress)
    return paths


def folder_name(prompts: Path) -> str:
    """A file's name and the start of its SHA-256, so that other prompts never continue these."""
    return f"{prompts.name.split('.')[0]}-{hashlib.sha256(prompts.read_bytes()).hexdigest()[:8]}"


def load_target(model: str) -> FrozenTarget:
    """The target's embedding, head and final norm, in bf16 (fp32 where the model is)."""
    folder = resolve_model(model)
    config = DecoderConfig.from_folder(folder)
    tensors = load_weights(folder, config)
    embed = tensors[EMBEDDING]
    return FrozenTarget(
        config=config,
        embed=embed,
        lm_head=tensors.get(HEAD, embed),
        norm=tensors["model.norm.weight"],
        fingerprint=fingerprint(config, tensors),
    )


def prepare(config: PipelineConfig, out: Path, paths: Sequence[Path], progress: Progress | None = None) -> Prepared:
    """Draft vocabulary, soft targets, feature scales."""
    target = load_target(config.model)
    shards = Shards.read(paths)
    if len(shards.entries) < 2:
        raise ConfigError(f"{out} holds {len(shards.entries)} answers to train on; give more prompts")
    train_entries, held_out = shards.split()
    vocabulary = DraftVocabulary.of_answers(
        (shards.answer_ids(entry) for entry in train_entries), target.config.vocab_size, config.draft_vocab_size
    )
    write_targets(shards, target.lm_head, vocabulary, progress)
    scales = feature_scales(shards, train_entries, target.config.hidden_size)
    frozen = Frozen(target.embed, target.lm_head[vocabulary.ids].contiguous(), vocabulary.mask(), scales)
    return Prepared(target, shards, train_entries, held_out[:HELD_OUT_LIMIT], vocabulary, frozen)


def new_head(config: PipelineConfig, prepared: Prepared) -> DraftHead:
    """A head at its start."""
    target = prepared.target
    head = DraftHead(target.head_config(config.draft_vocab_size), target.embed.dtype)
    if config.start_from is not None:
        load_tensors(head, load_file(config.start_from / "model.safetensors"), prepared.frozen.scales)
        return head
    generator = torch.Generator().manual_seed(config.training.seed)
    initialize(head, prepared.shards, prepared.train, prepared.frozen.scales, target.norm, generator)
    return head


def fit(config: PipelineConfig, out: Path, prepared: Prepared, answers: Sequence[Path]) -> Acceptance:
    """Stage 3: train, export at every checkpoint, judge on held-out answers; `answers` are stage 1's folders."""
    head = new_head(config, prepared)
    training = config.training
    packs = plan_packs(prepared.train, training.pack_queries, training.epochs, training.seed)
    tick = time.monotonic()

    def write(step: int) -> Acceptance:
        nonlocal tick
        _add_seconds(out, "training", time.monotonic() - tick)
        tick = time.monotonic()
        found = evaluate(head, prepared.shards, prepared.held_out, prepared.vocabulary, prepared.frozen)
        print(f"step {step}/{len(packs)}: held-out {found}", flush=True)
        about = provenance(config, out, prepared, found, step, len(packs))
        export(
            out / "head", head, prepared.vocabulary, prepared.frozen.scales, prepared.target, about,
            public=config.public,
        )  # fmt: skip
        return found

    train(head, prepared.shards, packs, prepared.frozen, training, out / "checkpoints", write)
    found = write(len(packs))
    every = (one for folder in answers for one in read_answers(folder))
    ops = specserve_kernels.load()
    write_successors(
        out / "head" / "successors.safetensors", make_successors(prepared.shards, every, prepared.target.lm_head, ops)
    )
    return found


def provenance(
    config: PipelineConfig, out: Path, prepared: Prepared, found: Acceptance, step: int, num_steps: int
) -> dict[str, Any]:
    """Where a head comes from."""
    return {
        "command": config.command,
        "model": config.model,
        "prompts": [
            {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in config.prompts
        ],
        "answers": {"quantization": config.quantization, **asdict(config.answers)},
        "features": asdict(config.features),
        "training": {**asdict(config.training), "start_from": None if config.start_from is None else "an earlier head"},
        "num_sequences": len(prepared.train),
        "num_answer_tokens": sum(entry.answer_len for entry in prepared.train),
        "steps": step,
        "steps_planned": num_steps,
        "hours": {name: round(seconds / 3600, 3) for name, seconds in _seconds(out).items()},
        "acceptance": {
            "on": f"{len(prepared.held_out)} held-out answers, greedy chains of {len(found.per_step)}",
            "length": round(found.length, 4),
            "per_step": [round(share, 4) for share in found.per_step],
        },
        "torch": torch.__version__,
    }


def _seconds(out: Path) -> dict[str, float]:
    path = out / ELAPSED
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _add_seconds(out: Path, stage: str, seconds: float) -> None:
    """Wall time over all runs, killed ones up to their last checkpoint."""
    total = _seconds(out)
    total[stage] = total.get(stage, 0.0) + seconds
    (out / ELAPSED).write_text(json.dumps(total), encoding="utf-8")
