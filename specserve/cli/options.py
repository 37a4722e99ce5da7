"""Options that several commands share, under vLLM's names where they mean the same.

An engine option left out is None and keeps the default of `config.py`, which its help quotes. A group of options is
a record with one option a field; `flat` lets a command take such a record as one parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specserve.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from specserve.constraint import GrammarSpec
from specserve.errors import ConfigError
from specserve.request import SamplingParams

_CACHE, _SCHEDULER, _SPECULATION = CacheConfig(), SchedulerConfig(), SpeculationConfig()

Model = Annotated[str, typer.Option(help="`demo`, a Hugging Face folder, a .gguf file, or a hub id.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32. [default: auto]")]
Quantization = Annotated[
    str | None, typer.Option(help="int8: hold and multiply the weights in 8 bits. [default: as they are]")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Context in tokens. [default: the model's]")]
BlockSize = Annotated[int | None, typer.Option(help=f"Tokens per KV page. [default: {_CACHE.page_size}]")]
KvCacheGib = Annotated[float | None, typer.Option(help="KV pool in GiB. [default: min(4, 25 % of free memory)]")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the model. [default: torch's]")]
Kernels = Annotated[str | None, typer.Option(help="auto, native, torch or reference. [default: auto]")]
Speculate = Annotated[
    str | None, typer.Option(help=f"off, auto, or a drafter such as ngram. [default: {_SPECULATION.drafter}]")
]
NumDraftTokens = Annotated[
    int | None, typer.Option(help="Draft at most this many tokens a step. [default: as many as pay]")
]
Prediction = Annotated[
    str | None,
    typer.Option(help="Text that the answer is expected to contain, or @FILE; drafted, it changes no token."),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help=f"Sequences served at once. [default: {_SCHEDULER.max_num_seqs}]")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help=f"Tokens of one step. [default: {_SCHEDULER.max_num_batched_tokens}]")
]


def given(**options: Any) -> dict[str, Any]:
    """Those options that the caller set."""
    return {name: value for name, value in options.items() if value is not None}


def engine_config(**options: Any) -> EngineConfig:
    """The configuration of flat options; None = left out.

    Raises:
        ConfigError: a value is refused.
    """
    return EngineConfig.from_options(**given(**options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a model runs on."""

    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto: a GPU if there is one. [default: cpu]")] = None
    numerics: Annotated[
        str | None, typer.Option(help="exact, or on a GPU fast: near-ties may flip. [default: exact]")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help=f"Share of a GPU that may be used. [default: {_CACHE.gpu_memory_utilization}]")
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that the caller set, by their name in the configuration."""
        return given(**asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSources:
    """What drafters with weights are made from."""

    draft_model: Annotated[
        str | None, typer.Option(help="Model that drafts as `draft_model`: a folder, a .gguf file or a hub id.")
    ] = None
    eagle_head: Annotated[
        str | None, typer.Option(help="Folder of an EAGLE head. [default: the one that came for this model, if any]")
    ] = None
    early_exit_layers: Annotated[
        int | None, typer.Option(help="Layers of the model that draft as `early_exit`. [default: two thirds]")
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that the caller set, by their name in SpeculationConfig."""
        return given(**asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is drawn, where it ends and what it has to look like."""

    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal ids. [default: fresh bits, reported]")] = None
    max_tokens: Annotated[int | None, typer.Option(help="Length of an answer. [default: what fits]")] = None
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 = off.")] = 0
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 = off.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 = off.")] = 0.0
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")
    ] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logit of what the answer has.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="The same, times how often the answer has it.")] = 0.0
    bad_word: Annotated[list[str] | None, typer.Option(help="Must not occur in the answer; may be repeated.")] = None
    json_schema: Annotated[str | None, typer.Option(help="Answer in JSON of this schema: a file, or its text.")] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this (Rust syntax).")] = None
    lark: Annotated[str | None, typer.Option(help="The answer follows this Lark grammar: a file, or its text.")] = None
    choice: Annotated[list[str] | None, typer.Option(help="Answer with this or another choice; repeat it.")] = None

    def params(self, temperature: float, n: int = 1) -> SamplingParams:
        """The parameters that these options ask for.

        Raises:
            ConfigError: more than one form was asked for, or its file cannot be read.
        """
        found = self._grammars()
        if len(found) > 1:
            names = " and ".join("--" + spec.kind.replace("_", "-") for spec in found)
            raise ConfigError(f"{names} were given; an answer can have only one form")
        return SamplingParams(
            n=n, temperature=temperature, seed=self.seed, max_tokens=self.max_tokens,
            top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, stop=tuple(self.stop or ()),
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, bad_words=tuple(self.bad_word or ()),
            grammar=found[0] if found else None,
        )  # fmt: skip

    def _grammars(self) -> list[GrammarSpec]:
        found = []
        if self.json_schema is not None:
            found.append(GrammarSpec("json_schema", _text("--json-schema", self.json_schema, marks="{")))
        if self.json_object:
            found.append(GrammarSpec("json_object"))
        if self.regex is not None:
            found.append(GrammarSpec("regex", self.regex))
        if self.lark is not None:
            found.append(GrammarSpec("lark", _text("--lark", self.lark, marks=":")))
        if self.choice:
            found.append(GrammarSpec("choice", tuple(self.choice)))
        return found


def _text(option: str, value: str, marks: str) -> str:
    """The text itself, told by a character that every such text has, or what is in the file of that name."""
    path = Path(value)
    if marks in value and not path.is_file():
        return value
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{option} {value!r} is neither a text with {marks!r} nor a file to read: {error}") from None


def predicted_text(value: str | None) -> str:
    """What `--prediction` says: the text itself, or what is in the file behind an @.

    Raises:
        ConfigError: the file cannot be read.
    """
    if value is None or not value.startswith("@"):
        return value or ""
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--prediction: the file {value[1:]!r} cannot be read: {error}") from None


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The same command for typer, with every parameter that is a record spread into one option per field."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    spread: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        record = records.get(name)
        if record is None:
            spread.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(record, include_extras=True)
        spread += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(record)
        ]

    def run(**given: Any) -> None:
        made = {name: record(**{f.name: given.pop(f.name) for f in fields(record)}) for name, record in records.items()}
        command(**made, **given)

    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
    run.__signature__ = Signature(spread)  # type: ignore[attr-defined]  # what typer reads
    return run
