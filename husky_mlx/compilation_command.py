"""``husky compile``: its options, and the table of what became of the model."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from husky_mlx.arguments import add_target, listed
from husky_mlx.chips import parse_memory
from husky_mlx.compilation import Compiled, compile_model
from husky_mlx.matrix import kernels_take
from husky_mlx.quantization import Choice
from husky_mlx.recipe import FLOAT_BITS, RECIPES, fitting
from husky_mlx.requantize import Change
from husky_mlx.rounding_model import METHODS

DESCRIPTION = (
    "Quantize a model by a recipe, pack it as the kernels of one chip take it, and store it, so "
    "that loading does none of that again. On Metal the GPU code itself is still compiled by MLX "
    "once per process."
)
UNIFORM_BITS, UNIFORM_GROUP = 4, 64
# Group of the table -> roles in it.
_GROUPS = {
    "embedding": ("embedding",),
    "head": ("head",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky compile``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(DESCRIPTION, 80)
    parser.epilog = f"recipes:\n{listed(RECIPES)}\n\nroundings:\n{listed(METHODS)}"
    parser.add_argument("model", help="a .hky folder; with --output any model that husky loads")
    add_target(
        parser,
        "auto (this machine), cpu, cuda, or a chip: ",
        "tells bins of a Mac's chip apart",
        default="auto",
    )
    parser.add_argument(
        "--quant",
        metavar="RECIPE",
        help="see below (default: keep for a quantized model, else 4bit)",
    )
    parser.add_argument("--budget", type=float, metavar="BPW", help="bits per weight, for auto")
    parser.add_argument(
        "--rounding", choices=tuple(METHODS), default="rtn", help="see below (default: rtn)"
    )
    parser.add_argument(
        "--calibrate", metavar="FILE", help="text for auto, gptq and awq (default: our own)"
    )
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="a LoRA or DoRA adapter to fuse in before quantizing"
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time launch choices on this machine's GPU, and store them",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="(default: MODEL/builds/<target>-<recipe>)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a build that husky wrote before"
    )


def run(args: argparse.Namespace) -> int:
    """Compile, then print the table and the predicted ceiling of decode."""
    made = compile_model(
        args.model,
        args.target,
        Choice(args.quant, args.budget, args.rounding, args.calibrate, args.adapter),
        args.output,
        memory=None if args.memory is None else parse_memory(args.memory),
        overwrite=args.overwrite,
        tune=args.tune,
    )
    Console().print(_table(made.changes))
    print("\n".join(_lines(made)))
    return 0


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("matrices", "bits", "MB", "error"):
        table.add_column(name, justify="left" if name in ("matrices", "bits") else "right")
    for group, roles in _GROUPS.items():
        found = [change for change in changes if change.tensor.role in roles]
        if not found:
            continue
        size = sum(change.nbytes for change in found) / 1e6
        table.add_row(f"{group} ({len(found)})", _bits(found), f"{size:,.1f}", _error(found))
    return table


def _bits(changes: Sequence[Change]) -> str:
    specs = dict.fromkeys(change.spec for change in changes)
    words = [
        "floats" if spec is None else f"{spec.bits} bit {spec.mode} group {spec.group_size}"
        for spec in specs
    ]
    return ", ".join(words)


def _error(changes: Sequence[Change]) -> str:
    """Of all values together: each matrix by its size, as if they were of one scale."""
    if any(change.error is None for change in changes):
        return "-"
    total = sum(change.tensor.size for change in changes)
    squares = sum(change.tensor.size * (change.error or 0.0) ** 2 for change in changes)
    return f"{(squares / total) ** 0.5:.2%}"


def _without_kernel(changes: Sequence[Change]) -> list[str]:
    """A line for formats that neither our kernels nor the CPU's program take."""
    missing = [
        f"{spec.bits} bit {spec.mode} in groups of {spec.group_size}"
        for spec in dict.fromkeys(change.spec for change in changes)
        if spec is not None and not kernels_take(spec.bits, spec.group_size, spec.mode)
    ]
    if not missing:
        return []
    return [
        f"no kernel takes {', '.join(missing)}: this build runs on plain MLX operations, slower"
    ]


def _lines(made: Compiled) -> list[str]:
    """The size, and what the chip's bandwidth allows at most for it and for two others."""
    tied = not any(change.tensor.role == "head" for change in made.changes)
    read = {
        "this build": sum(c.nbytes for c in made.changes if tied or c.tensor.role != "embedding")
    }
    matrices = [c.tensor for c in made.changes if tied or c.tensor.role != "embedding"]
    specs = {t.path: fitting(UNIFORM_BITS, t.shape[1], UNIFORM_GROUP) for t in matrices}
    uniform = sum(
        t.size * (FLOAT_BITS if (spec := specs[t.path]) is None else spec.bits_per_weight) / 8
        for t in matrices
    )
    read["uniform 4 bit"] = round(uniform)
    read["fp16"] = sum(t.size * FLOAT_BITS // 8 for t in matrices)
    lines = [f"{made.path}: {made.nbytes / 1e6:,.1f} MB, for {made.chip.name}"]
    sizes = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in read.items())
    lines.append(f"matrices that a token reads: {sizes}")
    lines += _without_kernel(made.changes)
    if not made.chip.bandwidth:
        return [*lines, "no ceiling of decode is predicted: this chip's bandwidth is not known"]
    ceilings = ", ".join(
        f"{name} {made.chip.bandwidth * 1e9 / size:,.0f} tok/s" for name, size in read.items()
    )
    lines.append(
        f"predicted ceiling of decode at {made.chip.bandwidth:g} GB/s, all of it for weights: "
        f"{ceilings}"
    )
    return lines
