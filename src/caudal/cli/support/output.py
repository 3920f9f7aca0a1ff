"""What goes to the terminal: results on standard output; progress and remarks on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


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


class _Bar:
    """A progress bar that appears when there is something to show."""

    def __init__(self, what: str, size: bool, delay: float, say: bool) -> None:
        self._what = what
        self._size = size
        self._appears = perf_counter() + delay
        self._say = say
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int | None) -> None:
        if perf_counter() < self._appears:
            return
        if not sys.stderr.isatty():
            if self._say:
                self._say = False
                remark(f"{self._what} ...")
            return
        if self._bar is None:
            self._bar = self._new_bar()
            self._bar.start()
            self._bar.add_task(self._what)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _new_bar(self) -> Progress:
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

        numbers = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if self._size else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *numbers, TimeRemainingColumn())
        return Progress(*columns, console=Console(stderr=True), transient=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress(
    what: str, *, size: bool = False, delay: float = 0.0, say: bool = False
) -> Generator[Callable[[int, int | None], None]]:
    """Shows how far something is, on a terminal. Yields a function that takes what is done and how much there is.

    `size`: they count bytes. `delay`: seconds before anything is shown, for what is usually quick. `say`: where
    there is no terminal, one line says what is going on.
    """
    bar = _Bar(what, size, delay, say)
    try:
        yield bar
    finally:
        bar.close()
