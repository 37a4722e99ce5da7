"""`specserve bench serve`: load a server that runs, and print what `vllm bench serve` prints, with acceptance."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.sim import counting_bar
from specserve.errors import ConfigError, EngineFault
from specserve.prompts import read_prompts

if TYPE_CHECKING:
    from specserve.loadgen.drive import Run
    from specserve.loadgen.targets import ServerFacts, Target
    from specserve.loadgen.workload import Job

# Bounds of one run: this is a measuring instrument, and a typing error should not make it a weapon.
MAX_PROMPTS = 100_000
MAX_LEN = 1 << 20
# Ids that an endpoint is sent as words, where it does not tell its vocabulary.
WORD_IDS = 1 << 16

bench = typer.Typer(help="Measure a server.", no_args_is_help=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked, and when."""

    dataset: Annotated[Path | None, typer.Option(help="Prompts from a JSONL file with `prompt` or `turns`.")] = None
    trace: Annotated[Path | None, typer.Option(help="Lengths and arrivals of an Azure CSV or a Mooncake JSONL.")] = None
    trace_speed: Annotated[float, typer.Option(help="Play the trace so many times as fast.")] = 1.0
    num_prompts: Annotated[int, typer.Option(min=1, max=MAX_PROMPTS, help="Requests to send.")] = 100
    input_len: Annotated[int, typer.Option(min=1, max=MAX_LEN, help="Tokens of a random prompt.")] = 256
    output_len: Annotated[int, typer.Option(min=1, max=MAX_LEN, help="Tokens of an answer.")] = 128
    request_rate: Annotated[
        float | None, typer.Option(help="Poisson arrivals, so many a second. [default: all at once]")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, arrivals and sampling.")] = 0
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Answers have their full length. [default: not with --dataset]")
    ] = None

    @property
    def full_length(self) -> bool:
        return self.dataset is None if self.ignore_eos is None else self.ignore_eos

    def check(self) -> None:
        """Raises ConfigError where options contradict each other."""
        if self.trace is not None and (self.dataset is not None or self.request_rate is not None):
            raise ConfigError("--trace brings its own prompts and arrivals; leave out --dataset and --request-rate")
        for name in ("request_rate", "trace_speed"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")

    def jobs(self, facts: ServerFacts) -> list[Job]:
        """The jobs, cut to what the server can hold."""
        from specserve.loadgen import workload

        vocab_size = facts.vocab_size or WORD_IDS
        if self.trace is not None:
            rows = workload.read_trace(self.trace, self.num_prompts)
            jobs = workload.trace_jobs(rows, vocab_size, self.seed, self.trace_speed)
        elif self.dataset is not None:
            prompts = [prompt for _, prompt in read_prompts(self.dataset)]
            jobs = workload.dataset_jobs(prompts, self.num_prompts, self.output_len)
        else:
            jobs = workload.random_jobs(self.num_prompts, self.input_len, self.output_len, vocab_size, self.seed)
        if self.request_rate is not None:
            jobs = workload.poisson(jobs, self.request_rate, self.seed)
        if facts.max_len:
            jobs, num_cut = workload.fit(jobs, facts.max_len)
            if num_cut:
                print(f"{num_cut} requests were cut to the server's {facts.max_len} tokens", file=sys.stderr)
        return jobs


@bench.command()
@options.flat
def serve(
    workload: Workload,
    host: Annotated[str, typer.Option(help="A specserve server's address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its gRPC port.")] = 50051,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI endpoint instead, such as http://host:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there; needed with --base-url.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="So many at once. [default: no limit]")] = None,
    max_duration: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds until the run is cut off.")] = 600.0,
    speculate: Annotated[str | None, typer.Option(help="Ask for this drafter, or off. [default: the server's]")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="Limits in ms: ttft:200 tpot:20 e2el:3000.")] = None,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG here.")] = None,
) -> None:
    """Load a server: closed loop (--max-concurrency), Poisson arrivals (--request-rate) or a --trace.

    Greedy answers to random prompts repeat themselves, which flatters speculation; judge it with --dataset.
    """
    workload.check()
    slos = _limits(goodput, more_goodput)
    if base_url is not None and model is None:
        raise ConfigError("--base-url needs --model, the name that the endpoint serves")

    how = (workload.temperature, workload.seed, workload.full_length)

    def target() -> Target:  # made inside the loop that it will live in
        from specserve.loadgen.targets import GrpcTarget, OpenAiTarget

        if base_url is not None:
            return OpenAiTarget(base_url, model or "", *how)
        return GrpcTarget(f"{host}:{port}", *how, drafter=speculate)

    found, run = asyncio.run(_measure(target, workload, slos, max_concurrency, max_duration))
    _tell(found, run, json_path, plot)
    if not found["completed"]:
        raise typer.Exit(1)


def _limits(first: list[str] | None, others: list[str] | None) -> dict[str, float]:
    """`--goodput ttft:200 tpot:20`, as vLLM takes it: typer gives the second item as an argument."""
    from specserve.loadgen.report import parse_goodput

    if others and not first:
        raise ConfigError(f"{others[0]!r} belongs to no option")
    return parse_goodput([*(first or ()), *(others or ())])


async def _measure(
    make_target: Any, workload: Workload, slos: dict[str, float], max_concurrency: int | None, max_duration: float
) -> tuple[dict[str, Any], Run]:
    from specserve.loadgen.drive import drive
    from specserve.loadgen.report import summarize
    from specserve.loadgen.targets import Outcome
    from specserve.loadgen.workload import random_jobs
    from specserve.provenance import provenance

    target: Target = make_target()
    try:
        facts = await target.facts()
        jobs = workload.jobs(facts)
        # one request that is not counted: it proves that the target answers, and pays for whatever is done once
        warm_up = random_jobs(1, 8, 2, facts.vocab_size or WORD_IDS, workload.seed + 1)[0]
        await target.ask(warm_up, Outcome(sent_at=0.0))
        with counting_bar("requests", len(jobs)) as progress:
            run = await drive(
                target, jobs, max_concurrency=max_concurrency, max_duration=max_duration, progress=progress
            )
    finally:
        await target.close()
    found = summarize(run, slos, max_concurrency, workload.request_rate)
    about = {"model": facts.model, "num_prompts": len(jobs), "goodput": slos}
    return {**about, **found, "provenance": provenance(facts.environment, workload.seed)}, run


def _tell(found: dict[str, Any], run: Run, json_path: Path | None, plot: Path | None) -> None:
    from specserve.loadgen.report import block

    print(block(found))
    for error, count in found["errors"].items():
        print(f"{count} requests failed: {error}", file=sys.stderr)
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        if plot is not None:
            from specserve.loadgen.plot import draw

            draw(run, plot)
    except OSError as error:
        raise EngineFault(f"the result cannot be written: {error}") from error
