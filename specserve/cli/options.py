"""Options that several commands share, under vLLM's names where they mean the same.

An option left out is None and keeps the default of `config.py`, which its help quotes.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specserve.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig

_CACHE, _SCHEDULER, _SPECULATION = CacheConfig(), SchedulerConfig(), SpeculationConfig()

Model = Annotated[str, typer.Option(help="`demo`, a Hugging Face folder, a .gguf file, or a hub id.")]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16 or float32. [default: auto]")]
MaxModelLen = Annotated[int | None, typer.Option(help="Context in tokens. [default: the model's]")]
BlockSize = Annotated[int | None, typer.Option(help=f"Tokens per KV page. [default: {_CACHE.page_size}]")]
KvCacheGib = Annotated[float | None, typer.Option(help="KV pool in GiB. [default: min(4, 25 % of free memory)]")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the model. [default: torch's]")]
Kernels = Annotated[str | None, typer.Option(help="auto, native, torch or reference. [default: auto]")]
Speculate = Annotated[
    str | None, typer.Option(help=f"off, auto, or a drafter such as ngram. [default: {_SPECULATION.drafter}]")
]
NumDraftTokens = Annotated[
    int | None, typer.Option(help=f"Draft at most this many tokens a step. [default: {_SPECULATION.num_draft_tokens}]")
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
