"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

Bar = contextlib.AbstractContextManager[Callable[[int], None]]


def bytes_bar(words: str, total: int) -> Bar:
    """A bar of ``total`` bytes; call what it gives with how many more are done."""
    return _bar(words, total, DownloadColumn())


def count_bar(words: str, total: int) -> Bar:
    """The same of ``total`` things."""
    return _bar(words, total, MofNCompleteColumn())


@contextlib.contextmanager
def _bar(words: str, total: int, column: ProgressColumn) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), column)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(words, total=total)
        yield lambda done: progress.advance(task, done)
