"""``husky bench --predict``: the roofline table of chips that are not here. Nothing is measured.

The roof of a chip is the same for every engine: what its memory and its arithmetic allow at best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from husky_mlx import chips, shapes
from husky_mlx.bench_table import print_rows
from husky_mlx.chips import Chip
from husky_mlx.config import LlamaConfig
from husky_mlx.errors import HuskyError
from husky_mlx.footprint import Footprint, footprint
from husky_mlx.roofline import needed, roof, working_set
from husky_mlx.support import examine

LENGTHS = (1024, 512)


def parse_chips(text: str, memory: str | None) -> list[tuple[Chip, str | None]]:
    """The chips of a comma-separated list of names, each with a note on what was left open.

    Raises ValueError for names that are not known.
    """
    size = None if memory is None else chips.parse_memory(memory)
    return [chips.parse(name, size) for name in text.split(",")]


def predict(settings: Mapping[str, Any], listed: Sequence[tuple[Chip, str | None]]) -> dict:
    """The table as a JSON-able dict: for each chip the roofs in 16 bit and as the weights are."""
    raw, config = _config(settings)
    sizes = {"16 bit": footprint(config, raw, unquantized=True)}
    stored = footprint(config, raw)
    if stored.weight_bytes() != sizes["16 bit"].weight_bytes():
        sizes[stored.words.split(" (")[0]] = stored
    prompts, replies = (
        settings[key] or [default]
        for key, default in zip(("prompt_tokens", "generation_tokens"), LENGTHS, strict=True)
    )
    return {
        "predicted": True,
        "settings": dict(settings) | {"prompt_tokens": prompts, "generation_tokens": replies},
        "weights": {name: size.words for name, size in sizes.items()},
        "notes": [note for _, note in listed if note],
        "rows": [
            _row(chip, sizes, prompt, reply)
            for chip, _ in listed
            for prompt in prompts
            for reply in replies
        ],
    }


def _config(settings: Mapping[str, Any]) -> tuple[dict[str, Any], LlamaConfig]:
    raw = settings["config"]
    if raw is None:
        verdict, raw, config = examine(settings["model"])
        if config is None:
            raise HuskyError(f"{settings['model']}: {'; '.join(verdict.reasons)}")
        return raw, config
    raw = shapes.quantized(raw, settings["bits"], settings["group_size"])
    return {**raw, "torch_dtype": settings["dtype"]}, LlamaConfig.from_dict(raw)


def _row(chip: Chip, sizes: Mapping[str, Footprint], prompt: int, reply: int) -> dict[str, Any]:
    least = chip.memory[0] if chip.memory else None
    context = prompt + reply
    return {
        "chip": asdict(chip),
        "prompt_tokens": prompt,
        "generation_tokens": reply,
        "roofs": {
            # Decode with the prompt and half of the reply in the cache.
            name: asdict(roof(size, chip, prompt, prompt + reply // 2))
            | {
                "needed": needed(size, context),
                "fits": None
                if least is None
                else needed(size, context) <= working_set(chip, least),
            }
            for name, size in sizes.items()
        },
    }


def print_prediction(result: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Print for people."""
    settings, names = result["settings"], list(result["weights"])
    print(f"{settings['model']}: PREDICTED from data sheets and byte counts, nothing was measured.")
    print("The roof is the same for every engine; real speeds are below it.")
    for note in result["notes"]:
        print(f"  - {note}")
    header = ["predicted", "GB/s", "prompt, reply"]
    header += [f"decode {name}, tok/s" for name in names]
    header += ["ratio"] * (len(names) == 2)
    header += [f"first token {name}, s" for name in names]
    header += [f"memory {name}, MB" for name in names]
    print()
    print_rows(header, [_cells(row, names) for row in result["rows"]], markdown=markdown)
    if any(roof["fits"] is False for row in result["rows"] for roof in row["roofs"].values()):
        print("\n* more than the least memory that the chip is sold with lets MLX use")


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    chip, roofs = row["chip"], [row["roofs"][name] for name in names]
    decode = [each["decode_tps"] for each in roofs]
    ratio = [f"{decode[1] / decode[0]:.2f}"] if len(roofs) == 2 else []
    cores = "c" if chip["target"] == "metal" else " SMs"
    memory = f", {chip['memory'][0]} GB" if chip["memory"] else ""
    return [
        f"{chip['name']}, {chip['cores']}{cores}{memory}",
        f"{chip['bandwidth']:g}",
        f"{row['prompt_tokens']}, {row['generation_tokens']}",
        *(f"{speed:.1f}" for speed in decode),
        *ratio,
        *(
            "not known" if each["prompt_seconds"] is None else f"{each['prompt_seconds']:.2f}"
            for each in roofs
        ),
        *(f"{each['needed'] / 1e6:,.0f}{' *' if each['fits'] is False else ''}" for each in roofs),
    ]
