"""`specserve verify`: a user's own proof, on their model and prompts, that speculation changes no token."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.pull import progress_bar
from specserve.cli.sim import counting_bar
from specserve.config import SpeculationConfig
from specserve.errors import ConfigError
from specserve.prompts import read_prompts

if TYPE_CHECKING:
    from specserve.build import Built
    from specserve.proof import Comparison, Proof

MAX_SHOWN_TEXT = 60


@options.flat
def verify(
    sources: options.DraftSources,
    model: options.Model = "demo",
    drafter: Annotated[str, typer.Option(help="The drafter to compare with `off`.")] = "auto",
    num_draft_tokens: options.NumDraftTokens = None,
    dataset: Annotated[
        Path | None, typer.Option(help="JSONL with `prompt` or `turns`. [default: twelve prompts of our own]")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts of the dataset.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first prompt; each next one has the next.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    kv_cache_gib: options.KvCacheGib = None,
    threads: options.Threads = None,
    kernels: options.Kernels = None,
) -> None:
    """Compare answers with speculation on and off, id for id; exit code 1 if they differ."""
    if drafter == "off":
        raise ConfigError("--drafter is 'off'; name the drafter that is to be compared with it")
    chosen = options.given(drafter=drafter, num_draft_tokens=num_draft_tokens)
    speculation = SpeculationConfig(**chosen, **sources.given())
    built = _built(
        model=model, speculation=speculation, dtype=dtype, quantization=quantization, max_model_len=max_model_len,
        page_size=block_size, kv_cache_gib=kv_cache_gib, threads=threads, kernels=kernels,
    )  # fmt: skip
    from specserve.proof import PROMPTS, prove

    prompts = (PROMPTS if dataset is None else [prompt for _, prompt in read_prompts(dataset)])[:limit]
    with counting_bar("comparisons", 4 * len(prompts)) as progress:
        proof = prove(
            built, prompts, drafter=drafter, num_draft_tokens=num_draft_tokens, max_tokens=max_tokens, seed=seed,
            progress=progress,
        )  # fmt: skip
    print(json.dumps(proof_json(proof), ensure_ascii=False)) if as_json else _print_proof(proof)
    if not proof.holds:
        raise typer.Exit(1)


def _built(**engine: Any) -> Built:
    """An engine in this process; the options are judged before anything is fetched."""
    config = options.engine_config(**engine)
    from specserve.build import build

    with progress_bar() as progress:
        return build(config, progress)


def proof_json(proof: Proof) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        **asdict(proof),
        "identical": len(proof.comparisons) - len(proof.divergent),
        "divergent": len(proof.divergent),
        "tie_flips": proof.num_tie_flips,
        "num_draft_tokens": proof.num_draft_tokens,
        "acceptance_length": proof.acceptance_length,
        "holds": proof.holds,
    }


def _print_proof(proof: Proof) -> None:
    print(proof.environment)
    for comparison in proof.comparisons:
        print(_told(comparison))
    same = len(proof.comparisons) - len(proof.divergent)
    print(
        f"{same} of {len(proof.comparisons)} answers are identical with speculation on ({proof.drafter}) and off;"
        f" {proof.num_draft_tokens:,} tokens were drafted, acceptance length {proof.acceptance_length:.2f}"
    )
    if proof.divergent:
        print(f"{len(proof.divergent)} differ, {proof.num_tie_flips} of them where the two likeliest tokens nearly tie")
    if not proof.num_draft_tokens:
        print("nothing was drafted, so nothing was proved")


def _told(comparison: Comparison) -> str:
    text = " ".join(comparison.text.split())
    shown = text if len(text) <= MAX_SHOWN_TEXT else text[: MAX_SHOWN_TEXT - 1] + "…"
    how = f"T = {comparison.temperature:g}, {'batched' if comparison.batched else 'alone'}"
    found = comparison.divergence
    if found is None:
        length = comparison.speculation.acceptance_length
        result = f"identical, {comparison.num_tokens} tokens, acceptance length {length:.2f}"
    else:
        on, off = (
            "the end" if token_id is None else f"{token_id} {piece!r}"
            for token_id, piece in ((found.on_id, found.on_text), (found.off_id, found.off_text))
        )
        margin = "unknown" if found.margin is None else f"{found.margin:.4f}"
        result = (
            f"DIFFERENT from token {found.position} on: {on} with speculation, {off} without; top-2 margin {margin}"
        )
    return f"[{comparison.prompt}] {how}: {result}  | {shown}"
