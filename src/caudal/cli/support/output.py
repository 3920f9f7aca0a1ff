"""What goes to the terminal: results on standard output; progress and remarks on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any


def print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=indent))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table; columns after the first whose cells all start with a digit are right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(row[index][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Without a terminal there is no width to fold at: programs read whole lines.
    Console(highlight=False, width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def remark(text: str) -> None:
    """A line for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, *, size: bool = False) -> Generator[Callable[[int, int | None], None]]:
    """A progress bar on standard error, if that is a terminal; yields a function that takes what is done so far
    and how much there is in all. `size`: they count bytes.
    """
    if not sys.stderr.isatty():
        yield _said_once(f"{what} ...") if size else lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    numbers = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if size else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *numbers, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _said_once(text: str) -> Callable[[int, int | None], None]:
    """What a log shows in place of a bar: one line when the work begins."""
    said: list[str] = []

    def say(done: int, total: int | None) -> None:
        if not said:
            said.append(text)
            remark(text)

    return say
