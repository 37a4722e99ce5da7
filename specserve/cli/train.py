"""`specserve train eagle`: an EAGLE-3 head for a model, from prompts to files, in stages that resume."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specserve.cli import options
from specserve.errors import ConfigError

STAGES = ("answers", "features", "head")
EXPORTS = ("shared", "public")

train = typer.Typer(help="Train what drafts.", no_args_is_help=True)


class StageBars:
    """A bar on stderr for each stage, from its first report on."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        from tqdm import tqdm

        bar = self._bars.get(what)
        if bar is None or bar.total != total:
            bar = self._bars[what] = tqdm(total=total, desc=what, dynamic_ncols=True)
        bar.update(done - bar.n)
        if done == total:
            self._bars.pop(what).close()


@train.callback()
def _train() -> None:
    """A group of one command for now; without this typer would make that command the group."""


@train.command()
def eagle(
    prompts: Annotated[list[Path], typer.Option(help="JSONL with `prompt` and `source`, .gz or not; repeat it.")],
    out: Annotated[Path, typer.Option(help="Folder of all stages; a rerun continues what is in it.")],
    model: options.Model = "demo",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of each file. [default: all]")] = None,
    max_tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 160,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers generated at once.")] = 64,
    quantization: options.Quantization = None,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that the head can guess.")] = 16384,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of mix, sampling, start and order.")] = 0,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between two checkpoints.")] = 5.0,
    until: Annotated[str, typer.Option(help="Stop after this stage: answers, features or head.")] = "head",
    export: Annotated[str, typer.Option(help="shared: the target's head is used; public: write lm_head.")] = "shared",
) -> None:
    """Train an EAGLE-3 head: the model answers the prompts, its features are stored, the head learns to guess."""
    _one_of("--until", until, STAGES)
    _one_of("--export", export, EXPORTS)
    from specserve_drafts.train.answers import AnswerConfig
    from specserve_drafts.train.loop import TrainConfig
    from specserve_drafts.train.pipeline import PipelineConfig, run

    config = PipelineConfig(
        model=model,
        prompts=tuple(prompts),
        max_prompts=max_prompts,
        max_num_seqs=max_num_seqs,
        quantization=quantization,
        draft_vocab_size=draft_vocab,
        answers=AnswerConfig(max_tokens=max_tokens, seed=seed),
        training=TrainConfig(
            epochs=epochs, learning_rate=learning_rate, seed=seed, checkpoint_seconds=60 * checkpoint_minutes
        ),
        public=export == "public",
        command=shlex.join(["specserve", *sys.argv[1:]]),
    )
    found = run(config, out, until, StageBars())
    if found is not None:
        print(f"{out / 'head'}: {found} on held-out answers")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} is {value!r}; allowed: {', '.join(allowed)}")
