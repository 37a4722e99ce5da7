"""Stage 1: the target answers the training prompts itself, through the engine that will serve the head.

A head learns what *this* target says, so answers are regenerated: half of them greedy, half sampled, each with a
seed of its own made from the prompt, so that neither batch, order nor a restart changes an answer. Answers are
written in shards; a shard has its name only when it is whole, and a rerun makes those that are missing.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specserve.errors import ConfigError, InvalidRequest
from specserve.llm import LLM
from specserve.request import SamplingParams

SHARD_PATTERN = "answers-*.jsonl"
MANIFEST = "answers.json"

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`."""


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    """One user message and where it came from."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said: all prompt ids (chat template included) and the ids of its answer."""

    source: str
    greedy: bool
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """How answers are drawn. Every odd prompt of the mix is sampled at `temperature`, the others are greedy."""

    max_tokens: int = 160
    max_prompt_tokens: int = 1024
    temperature: float = 0.7
    top_k: int = 50
    seed: int = 0
    shard_size: int = 1024

    def params(self, prompt: TrainPrompt, index: int) -> SamplingParams:
        """Sampling of the mix's prompt number `index`."""
        if index % 2 == 0:
            return SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        digest = hashlib.sha256(f"{self.seed}\n{prompt.text}".encode()).digest()
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            seed=int.from_bytes(digest[:8], "big") >> 1,
            max_tokens=self.max_tokens,
        )


def read_training_prompts(path: Path) -> list[TrainPrompt]:
    """The distinct prompts of a JSONL file (gzip or not) with `prompt` and, if it likes, `source`.

    Raises:
        ConfigError: the file cannot be read, holds none, or has a line without a prompt.
    """
    found: dict[str, TrainPrompt] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompt = _parse(line, f"prompts {path}, line {number}")
                    found.setdefault(prompt.text, prompt)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"prompts {path} holds none")
    return list(found.values())


def _parse(line: str, where: str) -> TrainPrompt:
    try:
        entry = json.loads(line)
        prompt, source = entry["prompt"], str(entry.get("source", "all"))
    except (ValueError, LookupError, TypeError, AttributeError):
        prompt, source = None, ""
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: no JSON object with a `prompt`")
    return TrainPrompt(source, prompt)


def balanced_mix(prompts: Sequence[TrainPrompt], seed: int) -> list[TrainPrompt]:
    """All prompts, shuffled, one of each source in turn: any prefix holds every source as evenly as it can."""
    by_source: dict[str, list[TrainPrompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    for source, group in sorted(by_source.items()):
        random.Random(f"{seed} {source}").shuffle(group)
    queues = [iter(by_source[source]) for source in sorted(by_source)]
    mix: list[TrainPrompt] = []
    while queues:
        turn = [(queue, drawn) for queue in queues if (drawn := next(queue, None)) is not None]
        mix += [drawn for _, drawn in turn]
        queues = [queue for queue, _ in turn]
    return mix


def generate_answers(
    llm: LLM, mix: Sequence[TrainPrompt], folder: Path, config: AnswerConfig, progress: Progress | None = None
) -> None:
    """Write the shards of `mix` that `folder` lacks.

    Raises:
        ConfigError: the folder holds answers that were made otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": llm.built.model_name, "environment": llm.built.environment, "config": asdict(config)}
    _check_manifest(folder / MANIFEST, about)
    for start in range(0, len(mix), config.shard_size):
        path = folder / f"answers-{start // config.shard_size:05d}.jsonl"
        count = min(config.shard_size, len(mix) - start)
        if _num_prompts(path) < count:
            part = list(enumerate(mix[start : start + count], start))
            _write_shard(path, count, _answer(llm, part, config))
        if progress is not None:
            progress("answers", start + count, len(mix))


def read_answers(folder: Path) -> Iterator[Answer]:
    """Every answer of a folder, in the order of the mix."""
    for path in sorted(folder.glob(SHARD_PATTERN)):
        yield from read_shard(path)


def read_shard(path: Path) -> Iterator[Answer]:
    """Every answer of one shard."""
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, 1, None):
            entry = json.loads(line)
            ids = (tuple(entry["prompt_ids"]), tuple(entry["answer_ids"]))
            yield Answer(entry["source"], entry["greedy"], *ids)


def _answer(llm: LLM, part: list[tuple[int, TrainPrompt]], config: AnswerConfig) -> list[Answer]:
    prompts: list[tuple[int, ...]] = []
    params: list[SamplingParams] = []
    kept: list[TrainPrompt] = []
    for index, prompt in part:
        try:
            ids = tuple(llm.built.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
        except InvalidRequest:  # half a surrogate pair, or a text that the template refuses
            continue
        if len(ids) <= config.max_prompt_tokens:
            prompts.append(ids)
            params.append(config.params(prompt, index))
            kept.append(prompt)
    outputs = llm.generate(prompts, params) if prompts else []
    return [
        Answer(prompt.source, param.greedy, output.prompt_token_ids, output.outputs[0].token_ids)
        for prompt, param, output in zip(kept, params, outputs, strict=True)
        if output.error is None and output.outputs[0].token_ids
    ]


def _num_prompts(path: Path) -> int:
    """How many prompts of the mix a shard covers; 0 where there is none."""
    if not path.is_file():
        return 0
    with path.open(encoding="utf-8") as lines:
        return int(json.loads(next(lines))["num_prompts"])


def _write_shard(path: Path, num_prompts: int, answers: list[Answer]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"num_prompts": num_prompts, "num_answers": len(answers)}) + "\n")
        for answer in answers:
            file.write(json.dumps(asdict(answer)) + "\n")
    os.replace(temporary, path)


def _check_manifest(path: Path, about: dict[str, Any]) -> None:
    if not path.is_file():
        path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in about.items():
        if found.get(name) != value:
            raise ConfigError(f"{path.parent} holds answers made with {name} {found.get(name)!r}; now it is {value!r}")
