"""The command line: one module per group of commands, nothing heavy imported before a command needs it.

An error that we raise on purpose is one line on stderr: exit code 2 when the caller can fix it by asking otherwise,
1 when not. What a command answers goes to stdout, everything about it to stderr.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specserve import __version__
from specserve.cli.acceptance import acceptance
from specserve.cli.ask import chat, generate
from specserve.cli.bench import bench
from specserve.cli.demo import demo
from specserve.cli.pull import pull
from specserve.cli.serve import serve
from specserve.cli.sim import sim
from specserve.cli.train import train
from specserve.cli.verify import verify
from specserve.errors import ConfigError, InvalidRequest, ModelNotFound, SpecserveError

__all__ = ["app", "main"]

app = typer.Typer(
    name="specserve",
    help="Low-latency LLM serving with speculative decoding that never changes a token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (pull, serve, generate, chat, demo, sim, verify, acceptance):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line on `sys.argv`, and exit."""
    try:
        app()
    except SpecserveError as error:
        print(f"specserve: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError | InvalidRequest | ModelNotFound) else 1) from None
