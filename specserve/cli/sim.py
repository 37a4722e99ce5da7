"""`specserve sim`: the engine under scripted faults, with a hash for a model; and the bar of commands that count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.sim import Report


@contextmanager
def counting_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told how many of `total` are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, completed=min(done, total))


def sim(
    seed: Annotated[int, typer.Option(help="Equal seeds play equal episodes.")] = 1,
    steps: Annotated[float, typer.Option(help="Engine steps to make, such as 1e6.")] = 20_000,
    replay: Annotated[
        Path | None, typer.Option(help="Play the reproducer in this file (one that a violation printed).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run the engine with a hash for a model under scripted faults, and check every law after every step."""
    if replay is not None:
        _replay(replay, as_json)
        return
    if not 1 <= steps <= 1e12:
        raise ConfigError(f"--steps is {steps:g}; allowed: 1 to 1e12")
    from specserve.sim import simulate

    with counting_bar("steps", int(steps)) as progress:
        report = simulate(seed, int(steps), progress)
    if as_json:
        print(json.dumps(report_json(report)))
    else:
        _print_report(report)
    if report.violation is not None:
        raise typer.Exit(1)


def report_json(report: Report) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "seed": report.seed,
        "num_episodes": report.num_episodes,
        "num_steps": report.num_steps,
        "num_rows": report.num_rows,
        "rows_per_step": report.rows_per_step,
        "steps_per_minute": report.steps_per_minute,
        "seconds": report.seconds,
        "coverage": dict(report.coverage),
        "violation": report.violation,
    }


def _print_report(report: Report) -> None:
    for what, count in sorted(report.coverage.items()):
        print(f"{count:>10,}  {what}")
    print(
        f"{report.num_steps:,} steps of {report.rows_per_step:.1f} rows in {report.num_episodes} episodes of seed"
        f" {report.seed}, {report.steps_per_minute:,.0f} steps a minute"
    )
    found = report.violation
    if found is None:
        print("no law was broken")
        return
    print(f"seed {found['seed']}, episode {found['episode']}, step {found['step']}: {found['law']} is broken")
    print(found["what"])
    print("the shortest script that still breaks it (save it, then: specserve sim --replay FILE):")
    print(json.dumps(found["reproducer"]))


def _replay(path: Path, as_json: bool) -> None:
    from specserve.sim import replay

    try:
        violation = replay(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be played: {type(error).__name__}: {error}") from error
    told = None if violation is None else {"law": violation.law, "what": violation.what, "step": violation.step}
    if as_json:
        print(json.dumps({"violation": told}))
    else:
        print("no law was broken" if violation is None else f"step {violation.step}: {violation}")
    if violation is not None:
        raise typer.Exit(1)
