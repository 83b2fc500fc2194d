"""``husky plan``: whether a model fits a machine, and how fast that machine could run it.

The machine need not be here, and nothing is downloaded but the model's config.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from husky_mlx import chips, device, shapes
from husky_mlx.chips import Chip
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import HuskyError
from husky_mlx.footprint import Footprint, footprint
from husky_mlx.memory import megabytes
from husky_mlx.roofline import Roof, largest_context, needed, roof, working_set
from husky_mlx.support import examine, print_verdict, table

DEFAULT_CONTEXT = 8192
KV_BITS = (8, 4)
SHAPE_BITS = 4
GROUP_SIZE = 64


@dataclass(frozen=True)
class Fit:
    """One model on one machine; sizes in bytes. ``predicted`` is the roof, nothing was measured."""

    model: str
    weights: str
    chip: Chip
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
    parser.add_argument(
        "--target", metavar="CHIP", help="m1, m4max-40c, sm_90 (default: this machine's)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="16gb (default: the least it is sold with)"
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

    Raises SourceError where the model cannot be found, ValueError for a chip that is not known.
    """
    if args.context is not None and args.context < 1:
        raise ValueError(f"--context must be at least 1, found {args.context}")
    chip, note = target_chip(args.target, args.memory)
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
    found = plan_fit(args.model, size, chip, args.context, note)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print_fit(found)
    return 0 if found.fits else 1


def target_chip(name: str | None, memory: str | None) -> tuple[Chip, str | None]:
    """The chip of ``--target`` and ``--memory``, by default this machine's, and a note on it.

    Raises ValueError for names that are not known, HuskyError where this machine has no GPU.
    """
    size = None if memory is None else chips.parse_memory(memory)
    if name is not None:
        return chips.parse(name, size)
    if device.target() == "cpu":
        raise HuskyError("MLX runs on the CPU here: say which chip is meant, as in --target m1")
    return chips.with_memory(chips.detect(), size), None


def with_bits(config: LlamaConfig, raw: dict[str, Any], bits: int | None) -> Footprint:
    """The footprint of a model as it is, or as if all its matrices had ``bits``."""
    if bits is None or bits == 16:
        return footprint(config, raw, unquantized=bits == 16)
    quantization = {"bits": bits, "group_size": GROUP_SIZE}
    return footprint(config, {**raw, "quantization": quantization})


def plan_fit(
    model: str, size: Footprint, chip: Chip, context: int | None, note: str | None = None
) -> Fit:
    """Whether and how the model fits the least memory that the chip is sold with."""
    if not chip.memory:
        raise HuskyError(f"the memory of {chip.name} is not known: give it, as in --memory 24gb")
    notes = [note] if note else []
    memory = chip.memory[0]
    if len(chip.memory) > 1:
        sizes = ", ".join(map(str, chip.memory))
        notes.append(f"sold with {sizes} GB: the least is taken, --memory says which")
    trained = size.config.max_position_embeddings
    tokens = context or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
    if trained is not None and tokens > trained:
        notes.append(f"the model is trained for {trained:,} tokens, fewer than asked for")
    budget = working_set(chip, memory)
    caches = {f"kv_bits {bits}": size.quantized_cache_bytes(tokens, bits) for bits in KV_BITS}
    return Fit(
        model=model,
        weights=size.words,
        chip=chip,
        notes=notes,
        memory_gb=memory,
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
    decode = (
        f"at most {predicted.decode_tps:.1f} tok/s with {fit.context:,} tokens in the cache "
        f"({megabytes(predicted.decode_bytes)} a token)"
    )
    print(table({"decode": decode, "prefill": prefill}))
