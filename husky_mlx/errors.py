"""The errors that this library raises on purpose. Each message is one complete sentence or list."""

from __future__ import annotations

from collections.abc import Sequence


class HuskyError(Exception):
    """Base of every error raised on purpose; the command line prints it in one line."""


class UnsupportedModel(HuskyError, ValueError):
    """A model that the frozen graph does not cover, with the exact differences.

    ``differences`` holds one sentence per field: what was found and what is supported.
    """

    def __init__(self, source: str, differences: Sequence[str]):
        self.source = source
        self.differences = list(differences)
        listed = "; ".join(self.differences)
        advice = (
            ' It may run on stock mlx-lm: load(..., fallback="mlx") or --backend mlx.'
            if self.may_run_elsewhere
            else ""
        )
        super().__init__(f"{source}: not supported by husky_mlx: {listed}.{advice}")

    @property
    def may_run_elsewhere(self) -> bool:
        """Whether trying mlx-lm's own class makes sense: it does not read GGUF files."""
        return not self.source.endswith(".gguf")

    def __reduce__(self) -> tuple[type, tuple[str, list[str]]]:
        """Other processes get it whole: the message alone would not build it again."""
        return type(self), (self.source, self.differences)


class CheckpointError(HuskyError, ValueError):
    """A damaged or inconsistent checkpoint: names the file or tensor, expected and found."""


class ArtifactError(CheckpointError):
    """A folder that husky wrote and that is no longer as it was, or of another format."""


class OutputError(HuskyError, OSError):
    """An output that cannot be written: no room, no permission, or something is there already."""


class SourceError(HuskyError, OSError):
    """A model that could not be found or fetched: says what was tried and what to do."""


class UsageError(HuskyError, ValueError):
    """Arguments that no model and no machine could take: the command line ends with 2."""


class SwitchError(HuskyError, ValueError):
    """An environment variable of ours that is set to what it does not take."""


class MemoryLimitError(HuskyError, MemoryError):
    """An allocation that would not fit the device: need, have, and what would fit."""


class ContextLimitError(HuskyError, ValueError):
    """More tokens than ``max_context`` allows."""


def exit_code(error: BaseException) -> int:
    """Of a command that ends with the error: 2 for a wrong command line, as argparse, else 1."""
    return 2 if isinstance(error, UsageError) else 1


def brief(error: BaseException) -> str:
    """The first four lines of an error as one; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " | ".join(lines[:4]) or type(error).__name__
