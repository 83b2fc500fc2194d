"""A progress bar on stderr, where that is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def bytes_bar(words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of ``total`` bytes; call what it gives with how many more are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(words, total=total)
        yield lambda done: progress.advance(task, done)
