"""`specserve acceptance`: how much speculation brings on a user's own prompts, and why not more."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.pull import progress_bar
from specserve.cli.sim import counting_bar
from specserve.config import SpeculationConfig
from specserve.errors import ConfigError, EngineFault
from specserve.prompts import OWN_PROMPTS, read_prompts

if TYPE_CHECKING:
    from specserve.acceptance.fixed import Curve
    from specserve.acceptance.questions import Settings
    from specserve.acceptance.records import Answer, Side
    from specserve.config import EngineConfig

DEFAULT_DRAFTER = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked, and who drafts."""

    drafter: Annotated[
        list[str] | None, typer.Option(help=f"Compare this drafter with off; repeatable. [default: {DEFAULT_DRAFTER}]")
    ] = None
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Draft at most so many tokens a step. [default: the controller decides]")
    ] = None
    dataset: Annotated[
        Path | None, typer.Option(help="JSONL with `prompt` or `turns`, and `category`. [default: 48 prompts of ours]")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Ask so many prompts, categories in turns.")] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 128
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts lose their middle.")] = 1024
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Of the order and of sampling.")] = 0
    cold: Annotated[
        bool, typer.Option("--cold", help="Ask once more with nothing kept from earlier prompts, and report both.")
    ] = False

    def settings(self) -> Settings:
        from specserve.acceptance.questions import Settings

        return Settings(
            max_tokens=self.max_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            temperature=self.temperature,
            seed=self.seed,
            num_draft_tokens=self.num_draft_tokens,
        )

    def names(self) -> list[str]:
        """The drafters, each once.

        Raises:
            ConfigError: off is among them.
        """
        names = list(dict.fromkeys(self.drafter or [DEFAULT_DRAFTER]))
        if "off" in names:
            raise ConfigError("--drafter is 'off', which is always asked as well; name what is compared with it")
        return names

    def sides(self) -> list[Side]:
        from specserve.acceptance.records import Side

        return [
            Side(drafter=name, cold=cold)
            for name in self.names()
            for cold in ((False, True) if self.cold else (False,))
        ]

    def prompts(self) -> list[tuple[str, str]]:
        from specserve.acceptance.questions import chosen

        return chosen(read_prompts(self.dataset or OWN_PROMPTS), self.limit, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the result goes."""

    json_path: Annotated[str | None, typer.Option("--json", help="Write all figures to this file; - is stdout.")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None

    def tell(self, result: dict[str, Any], shown: str, page: str | None) -> None:
        """Raises EngineFault where a file cannot be written."""
        if self.json_path == "-":
            print(json.dumps(result, ensure_ascii=False))
        else:
            print(shown)
        try:
            if self.json_path not in (None, "-"):
                Path(self.json_path).write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
            if self.html is not None and page is not None:
                self.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise EngineFault(f"the result cannot be written: {error}") from error


@options.flat
def acceptance(
    questions: Questions,
    output: Output,
    sources: options.DraftSources,
    server: Annotated[
        str | None, typer.Option(help="host:port of a server: watch it, or ask it the prompts of --dataset.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="How long to watch the server.")] = 30.0,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two files of --json: the second against the first.")
    ] = None,
    model: options.Model = "demo",
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    kv_cache_gib: options.KvCacheGib = None,
    threads: options.Threads = None,
    kernels: options.Kernels = None,
) -> None:
    """Measure what drafters bring on real prompts, why not more, and which draft length would be best."""
    names = questions.names()
    if compare is not None:
        _compare(*compare, output)
    elif server is not None and questions.dataset is None:
        _watch(server, seconds, output)
    elif server is not None:
        _ask_server(server, questions, output)
    else:
        from specserve.acceptance.verdict import FROM_MODEL

        # a drafter with weights of its own is loaded only if it is the configured one
        configured = next((name for name in names if name in FROM_MODEL), names[0])
        engine = options.engine_config(
            model=model, speculation=SpeculationConfig(drafter=configured, **sources.given()), dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len, page_size=block_size, kv_cache_gib=kv_cache_gib, threads=threads,
            kernels=kernels,
        )  # fmt: skip
        _measure(engine, questions, output)


def _measure(config: EngineConfig, questions: Questions, output: Output) -> None:
    prompts, sides = questions.prompts(), questions.sides()
    from specserve.acceptance.measure import measure
    from specserve.build import build

    with progress_bar() as loading:
        built = build(config, loading)
    with counting_bar("answers", len(prompts) * (1 + len(sides))) as progress:
        answers = measure(built, prompts, sides, questions.settings(), progress)
    costs = built.engine.controller.costs
    _report(
        answers,
        questions,
        output,
        {"model": built.model_name},
        built.environment,
        None if costs is None else costs.rows,
    )


def _ask_server(server: str, questions: Questions, output: Output) -> None:
    if questions.cold:
        raise ConfigError("--cold needs an engine in this process; leave out --server")
    prompts, sides = questions.prompts(), questions.sides()
    from specserve.acceptance.attach import UNKNOWN_OF_ANSWERS, ask

    with counting_bar("answers", len(prompts) * (1 + len(sides))) as progress:
        facts, answers, failed = asyncio.run(ask(server, prompts, sides, questions.settings(), progress))
    for prompt, error in failed.items():
        print(f"prompt {prompt} is left out: {error}", file=sys.stderr)
    about = {"model": facts.model, "server": server, "unknown": list(UNKNOWN_OF_ANSWERS), "failed": failed}
    _report(answers, questions, output, about, facts.environment)


def _report(
    answers: list[Answer],
    questions: Questions,
    output: Output,
    about: dict[str, Any],
    environment: str,
    curve: Curve | None = None,
) -> None:
    from specserve.acceptance.page import page
    from specserve.acceptance.report import result_of, text
    from specserve.acceptance.verdict import different
    from specserve.provenance import provenance

    result = {
        **about,
        **asdict(questions.settings()),
        "dataset": str(questions.dataset or "specserve's own prompts"),
        **result_of(answers, questions.temperature, questions.num_draft_tokens, curve),
        "provenance": provenance(environment, questions.seed),
    }
    output.tell(result, text(result), page(result))
    if result["num_different"]:
        print(different(result["num_different"], len(answers)), file=sys.stderr)
        raise typer.Exit(1)


def _watch(server: str, seconds: float, output: Output) -> None:
    from specserve.acceptance.attach import watch
    from specserve.acceptance.report import counters_text
    from specserve.provenance import provenance

    if output.html is not None:
        raise ConfigError("--html needs answers of its own; add --dataset, or leave out --server")
    with counting_bar("seconds", int(seconds)) as progress:
        facts, found = asyncio.run(watch(server, seconds, progress))
    result = {"model": facts.model, "server": server, **found, "provenance": provenance(facts.environment, 0)}
    output.tell(result, counters_text(result), None)


def _compare(first: Path, second: Path, output: Output) -> None:
    from specserve.acceptance.compare import compared, read_result, table_of
    from specserve.tables import table

    rows = compared(read_result(first), read_result(second))
    shown = table_of(rows)
    text = f"A: {first}\nB: {second}\n\n{shown.title}\n\n{table(shown.columns, shown.rows)}\n\n{shown.note}"
    output.tell({"first": str(first), "second": str(second), "differences": rows}, text, None)
