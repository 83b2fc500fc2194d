"""The one printer of what people should know besides the result."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def notice(text: str) -> None:
    """One line for people, kept off stdout."""
    print(f"husky: {text}", file=sys.stderr, flush=True)


@contextmanager
def warnings_as_notices() -> Iterator[None]:
    """What is meant for a user of the command line, without a place in the code."""
    before = warnings.formatwarning

    def plain(message, category, filename, lineno, line=None):
        if issubclass(category, UserWarning):
            return f"husky: warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before
