"""``husky plan``: whether a model fits a machine, and how fast that machine could run it.

The machine need not be here, and nothing is downloaded but the model's config.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from husky_mlx import chips, device, shapes
from husky_mlx.arguments import add_target
from husky_mlx.chips import Chip
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import HuskyError, UsageError
from husky_mlx.footprint import DEFAULT_CONTEXT, Footprint, footprint
from husky_mlx.memory import megabytes, memory_limit
from husky_mlx.roofline import GB, Roof, largest_context, needed, roof, working_set
from husky_mlx.support import examine, print_verdict, table

KV_BITS = (8, 4)
SHAPE_BITS = 4
GROUP_SIZE = 64


class Machine(NamedTuple):
    """Where a model shall run: ``memory`` in GB, what MLX may use of it in bytes (``working_set``),
    what was assumed, and whether it is this machine, which was asked."""

    chip: Chip
    memory: int
    working_set: int
    notes: list[str]
    here: bool = False


@dataclass(frozen=True)
class Fit:
    """One model on one machine; sizes in bytes. ``predicted`` is the roof, nothing was measured.

    ``this_machine``: the working set is the one that MLX reports here."""

    model: str
    weights: str
    chip: Chip
    this_machine: bool
    notes: list[str]
    memory_gb: int
    working_set: int
    context: int
    trained_context: int | None
    needed: int
    fits: bool
    largest_context: int | None
    parts: dict[str, int]
    quantized_caches: dict[str, int]
    predicted: Roof


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face repo, a folder, a .gguf file, an alias, or one of "
        f"{', '.join(shapes.SHAPES)}",
    )
    add_target(
        parser,
        "",
        "default this machine's, or the least that the chip is sold with",
        here="this machine's GPU",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="TOKENS",
        help=f"prompt and reply together (default {DEFAULT_CONTEXT}, or what it is trained for)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(4, 8, 16),
        help=f"as if its weights had these, in groups of {GROUP_SIZE} (default: as they are; "
        f"{SHAPE_BITS} for a name of dimensions alone)",
    )
    parser.add_argument("--json", action="store_true", help="only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Print whether the model fits; 0 if it does, 1 if not or if it is refused.

    Raises SourceError where the model cannot be found, UsageError for a chip that is not known.
    """
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context must be at least 1, found {args.context}")
    machine = target_machine(args.target, args.memory)
    if args.model in shapes.SHAPES:
        raw = shapes.shape_config(args.model)
        size = with_bits(LlamaConfig.from_dict(raw), raw, args.bits or SHAPE_BITS)
    else:
        verdict, raw, config = examine(args.model)
        if config is None:
            if args.json:
                print(json.dumps(asdict(verdict), indent=2))
            else:
                print_verdict(verdict)
            return 1
        size = with_bits(config, raw, args.bits)
    found = plan_fit(args.model, size, machine, args.context)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print_fit(found)
    return 0 if found.fits else 1


def target_machine(name: str | None, memory: str | None) -> Machine:
    """The machine of ``--target`` and ``--memory``, by default this one as it is.

    Raises UsageError for names that are not known and for a chip without its memory, HuskyError
    where this machine has no GPU.
    """
    size = None if memory is None else chips.parse_memory(memory)
    if name is not None:
        chip, note = chips.parse(name, size)
    elif device.target() == "cpu":
        raise HuskyError(
            "MLX runs on the CPU here, and this plans for GPUs: say which, as in --target m1"
        )
    else:
        chip, note = chips.identify()
        if size is None:
            limit = memory_limit()
            real = chip.memory[0] if chip.memory else round(limit / GB)
            return Machine(chip, real, limit, [note] if note else [], here=True)
        chip, note = chips.with_memory(chip, size)
    if not chip.memory:
        raise UsageError(f"the memory of {chip.name} is not known: give it, as in --memory 24gb")
    notes = [note] if note else []
    if len(chip.memory) > 1:
        sizes = ", ".join(map(str, chip.memory))
        notes.append(f"sold with {sizes} GB: the least is taken, --memory says which")
    return Machine(chip, chip.memory[0], working_set(chip, chip.memory[0]), notes)


def with_bits(config: LlamaConfig, raw: dict[str, Any], bits: int | None) -> Footprint:
    """The footprint of a model as it is, or as if all its matrices had ``bits``."""
    if bits is None or bits == 16:
        return footprint(config, raw, unquantized=bits == 16)
    return footprint(config, shapes.quantized(raw, bits, GROUP_SIZE))


def plan_fit(model: str, size: Footprint, machine: Machine, context: int | None) -> Fit:
    """Whether and how the model fits the machine."""
    chip, budget, notes = machine.chip, machine.working_set, list(machine.notes)
    trained = size.config.max_position_embeddings
    tokens = context or size.usual_context()
    if trained is not None and tokens > trained:
        notes.append(f"the model is trained for {trained:,} tokens, fewer than asked for")
    caches = {f"kv_bits {bits}": size.quantized_cache_bytes(tokens, bits) for bits in KV_BITS}
    return Fit(
        model=model,
        weights=size.words,
        chip=chip,
        this_machine=machine.here,
        notes=notes,
        memory_gb=machine.memory,
        working_set=budget,
        context=tokens,
        trained_context=trained,
        needed=needed(size, tokens),
        fits=needed(size, tokens) <= budget,
        largest_context=largest_context(size, budget),
        parts={
            **size.parts(),
            "KV cache": size.allocated_cache_bytes(tokens),
            "activations": size.workspace_bytes(tokens),
        },
        quantized_caches={name: found for name, found in caches.items() if found is not None},
        predicted=roof(size, chip, tokens, tokens),
    )


def print_fit(fit: Fit) -> None:
    """Print for people."""
    chip, predicted = fit.chip, fit.predicted
    cores = f"{chip.cores} {'GPU cores' if chip.target == 'metal' else 'multiprocessors'}"
    print(f"{fit.model}, {fit.weights}")
    print(f"on {chip.name}: {cores}, {fit.memory_gb} GB, {chip.bandwidth:g} GB/s")
    for note in fit.notes:
        print(f"  - {note}")
    limit = "Metal recommends about" if chip.target == "metal" else "the GPU has"
    limit = "MLX may use" if fit.this_machine else limit
    verdict = "fits" if fit.fits else "does not fit"
    print(
        f"{verdict}: {megabytes(fit.needed)} at {fit.context:,} tokens, {limit} "
        f"{megabytes(fit.working_set)}"
    )
    most = fit.largest_context
    longest = "any length: every layer has a window" if most is None else f"{most:,} tokens"
    trained = f" (trained for {fit.trained_context:,})" if fit.trained_context else ""
    rows = {"largest context": longest + trained}
    rows |= {name: megabytes(size) for name, size in fit.parts.items()}
    for name, size in fit.quantized_caches.items():
        rows[name] = f"a KV cache of {megabytes(size)}, on the reference path"
    print(table(rows))
    print("predicted from the chip's figures, not measured:")
    if predicted.prompt_seconds is None:
        prefill = "the chip's arithmetic is not known"
    else:
        prefill = (
            f"{predicted.prompt_seconds:.2f} s at its peak for {fit.context:,} tokens, bound by "
            f"{predicted.prompt_bound}"
        )
    whose = "a small GPU of this kind " if chip.stand_in else ""
    decode = (
        f"{whose}at most {predicted.decode_tps:.1f} tok/s with {fit.context:,} tokens in the "
        f"cache ({megabytes(predicted.decode_bytes)} a token)"
    )
    print(table({"decode": decode, "prefill": prefill}))
