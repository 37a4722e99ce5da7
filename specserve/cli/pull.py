"""`specserve pull`: fetch and convert a model before it is needed, and the progress bar of every other command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

Progress = Callable[[str, int, int], None]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr per thing that is done, from its first report on; nothing if nothing is to be done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Bars(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if not tasks:
            bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()


def pull(name: Annotated[str, typer.Argument(help="`demo`, a .gguf file, or a hub id.")]) -> None:
    """Fetch a model into the cache, checked and converted, and print its folder."""
    from specserve.models.hub import resolve_model

    with progress_bar() as progress:
        folder = resolve_model(name, progress)
    print(folder)
