"""``husky eval``: how far recipes and quantized models are from the model that they come from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from husky_mlx import bench_run, sources
from husky_mlx.arguments import at_least, listed
from husky_mlx.bench_report import describe_run
from husky_mlx.calibrate_forward import array_module
from husky_mlx.calibrate_text import (
    calibration_sequences,
    calibration_texts,
    held_out_texts,
    sequences,
)
from husky_mlx.calibrate_weights import FloatWeights
from husky_mlx.errors import HuskyError
from husky_mlx.evaluate_models import Evaluation, Row
from husky_mlx.evaluate_report import figure_class, figures, plot, print_table
from husky_mlx.loading import read_tokenizer
from husky_mlx.notices import notice
from husky_mlx.paths import require_writable, write_whole
from husky_mlx.recipe import FLOAT_RECIPES, RECIPES, check_budget
from husky_mlx.rounding_model import METHODS
from husky_mlx.structure import AFFINE_GROUP_SIZES

# Decode speed of models on disk, as husky bench measures it.
_PROMPT_TOKENS, _GENERATION_TOKENS, _ROUNDS = 128, 64, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky eval``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"recipes:\n{listed(RECIPES)}\n\nroundings:\n{listed(METHODS)}"
    parser.add_argument(
        "--model",
        default="smollm2",
        help="the reference, in float32: folder, .gguf, alias or repo (default smollm2)",
    )
    parser.add_argument(
        "--recipes",
        type=_names(RECIPES),
        help="comma-separated (default 8bit,4bit,4bit-uniform; none with --compare)",
    )
    parser.add_argument(
        "--rounding",
        type=_names(METHODS),
        default=["rtn"],
        help=f"comma-separated, of {', '.join(METHODS)} (default rtn)",
    )
    parser.add_argument("--group-size", type=int, choices=AFFINE_GROUP_SIZES, help="(default 64)")
    parser.add_argument("--budget", type=float, metavar="BPW", help="bits per weight for auto")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="MODEL", help="models on disk, rows too"
    )
    parser.add_argument("--text", metavar="FILE", help="evaluate on this text instead of our own")
    parser.add_argument("--calibrate", metavar="FILE", help="calibrate on this text instead")
    parser.add_argument(
        "--length", type=at_least(2), default=256, help="tokens a sequence (default 256)"
    )
    parser.add_argument(
        "--tokens", type=at_least(2), help="at most so many of each domain (default all)"
    )
    parser.add_argument(
        "--no-speed", action="store_true", help="do not time the decode of --compare's models"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write KL against size as a PNG")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the table; errors of files and names come before anything is computed."""
    names = args.recipes or ([] if args.compare else ["8bit", "4bit", "4bit-uniform"])
    check_budget(names, args.budget)
    if args.plot is not None:
        figure_class()
    for name, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None:
            require_writable(file, name)
    held_out, calibration_text = held_out_texts(args.text), calibration_texts(args.calibrate)
    # MLX's float32 products on GPUs may pass through TF32: its rounding would be measured too.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    xp = array_module()
    path = sources.resolve(args.model, notify=notice)
    source = FloatWeights(path, xp)
    others = {name: sources.resolve(name, notify=notice) for name in args.compare}
    tokenizer = read_tokenizer(path)
    texts = {}
    for domain, text in held_out.items():
        ids = sequences(tokenizer, text, args.length)
        most = len(ids) if args.tokens is None else max(args.tokens // ids.shape[1], 1)
        texts[domain] = ids[:most]
    calibration = calibration_sequences(tokenizer, calibration_text)
    notice(f"{sum(ids.size for ids in texts.values())} tokens of {', '.join(texts)}")
    evaluation = Evaluation(source, texts, xp)
    rows = [evaluation.unquantized()]
    for name in names:
        for method in [""] if name in ("keep", *FLOAT_RECIPES) else args.rounding:
            notice(f"{name} {method}".strip())
            rows.append(
                evaluation.by_recipe(
                    name,
                    method,
                    calibration,
                    group_size=args.group_size,
                    budget_bpw=args.budget,
                )
            )
    for name, folder in others.items():
        notice(name)
        rows.append(evaluation.stored(name, folder))
    if not args.no_speed:
        _add_speeds(dict(zip(others, rows[len(rows) - len(others) :], strict=True)), others)
    print_table(rows)
    if names:
        print("Decode speed is measured of models on disk only (--compare).")
    tokens = {domain: found.tokens for domain, found in rows[0].domains.items()}
    if args.json is not None:
        content = describe_run() | {"model": args.model} | figures(rows, tokens)
        write_whole(args.json, json.dumps(content, indent=2).encode())
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def _names(known: Mapping[str, str]) -> Callable[[str], list[str]]:
    """The type of a comma-separated list of different names out of ``known``."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known) or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(
                f"expected different names out of {', '.join(known)}, found {text}"
            )
        return names

    return parse


def _add_speeds(rows: Mapping[str, Row], folders: Mapping[str, Path]) -> None:
    """Time each model on disk. What was evaluated before is not lost to one that cannot be timed,
    nor to Ctrl-C."""
    try:
        for name, row in rows.items():
            try:
                row.decode_tps = _decode_speed(folders[name])
            except HuskyError as error:
                notice(f"{name} was not timed: {error}")
    except KeyboardInterrupt:
        notice("interrupted: what is not timed yet has no speed")


def _decode_speed(path: Path) -> float:
    """Tokens a second of husky's engine in a process of its own, the median of the rounds."""
    lengths = _PROMPT_TOKENS, _GENERATION_TOKENS
    return bench_run.decode_speeds(["husky"], str(path), *lengths, _ROUNDS)["husky"]
