"""Command line arguments that several commands share, and types of others."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping


def add_target(
    parser: argparse.ArgumentParser,
    others: str,
    memory: str,
    default: str | None = None,
    *,
    here: str = "this machine",
) -> None:
    """Add ``--target`` and ``--memory``. ``others``: what a target may be besides a chip;
    ``memory``: what its size is for; ``here``: the default in words."""
    parser.add_argument(
        "--target",
        metavar="CHIP",
        default=default,
        help=f"{others}m3pro, m4max-40c, sm_90 (default: {here})",
    )
    parser.add_argument("--memory", metavar="SIZE", help=f"of the target, as in 36gb: {memory}")


def listed(descriptions: Mapping[str, str]) -> str:
    """Names with what they mean, one a line, for the end of a help text."""
    return "\n".join(f"  {name:<14}{words}" for name, words in descriptions.items())


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``smallest`` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected a number from {smallest} up, found {text}")
        return int(text)

    return parse


def numbers_from(smallest: int) -> Callable[[str], list[int]]:
    """The type of an argument that is a comma-separated list of different such numbers."""

    def parse(text: str) -> list[int]:
        numbers = [at_least(smallest)(part) for part in text.split(",")]
        return list(dict.fromkeys(numbers))

    return parse
