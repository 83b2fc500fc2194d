"""What a build is made for: a chip, this machine's GPU, or the CPU program."""

from __future__ import annotations

import re
from collections.abc import Callable

from husky_mlx import chips, device
from husky_mlx.chips import Chip
from husky_mlx.errors import UsageError

CPU = Chip("cpu", "cpu", 0, 0, 0)
# The oldest of the data centre's, whose tiles every later one takes.
_ANY_CUDA = "sm_80"


def this_machine() -> Chip:
    """The chip that MLX computes on here."""
    return CPU if device.target() == "cpu" else chips.detect()


def parse_target(
    text: str, notify: Callable[[str], None], memory: int | None = None
) -> tuple[str, Chip]:
    """The name of a target in a build's, and its chip.

    ``text``: "auto" (this machine), "cpu", "cuda" (the GPU of this machine, else any) or a chip as
    ``chips.parse`` takes it, with ``memory`` in GB. ``notify`` gets what was assumed. UsageError
    lists what there is.
    """
    name = text.strip().lower()
    if name == "cpu":
        return "cpu", CPU
    here = this_machine()
    if name == "auto" or (name == "cuda" and here.target == "cuda"):
        return _plain(here.name), here
    if name == "cuda":
        notify(f"no NVIDIA GPU here: taking the tiles of {_ANY_CUDA} for target cuda")
        return "cuda", chips.parse(_ANY_CUDA)[0]
    try:
        chip, note = chips.parse(text, memory)
    except UsageError as error:
        raise UsageError(f"target {text!r}: {error}, or auto, cuda, cpu") from None
    if note is not None:
        notify(note)
    cores = f"-{chip.cores}c" if re.search(r"-\d+c$", name) else ""
    return f"{_plain(chip.name)}{cores}", chip


def _plain(name: str) -> str:
    """A chip's name as part of a folder's: MLX gives one that no table has as the system does."""
    return re.sub(r"[^a-z0-9_.]", "", name.lower())
