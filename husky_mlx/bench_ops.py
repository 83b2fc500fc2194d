"""``husky bench ops``: every kernel of the decode step against the MLX operations it replaces.

Both sides compute the same and are compared before they are timed. Rounds interleave them with an
empty kernel and with MLX's own copy, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from husky_mlx import checkpoint, graphs, shapes, sources
from husky_mlx.arguments import at_least, numbers_from
from husky_mlx.bench_machine import describe_machine
from husky_mlx.bench_ops_cases import OPS, Case, Cases
from husky_mlx.bench_ops_timing import SHORT, Chain, Stopwatch, floor, launches_of
from husky_mlx.bench_report import describe_run, summarise
from husky_mlx.bench_run import SEED, interleave
from husky_mlx.bench_table import cell, noisy_words, print_rows, spread_words
from husky_mlx.errors import HuskyError, UsageError
from husky_mlx.loading import build_model
from husky_mlx.model import Model
from husky_mlx.notices import notice
from husky_mlx.ops.gemv import Platform
from husky_mlx.places import MAX_ROWS

# Of the result's Euclidean norm. On CUDA MLX adds up 4-bit products in the activations' type; a
# kernel that lost a part of the work would be off by a tenth of it at least.
TOLERANCE = {mx.float32: 0.01, mx.float16: 0.02, mx.bfloat16: 0.05}
# What a side's figures begin with, and what messages call it.
SIDES = {"": "ours", "stock_": "stock", "floor_": "floor"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``husky bench ops``, named as ``husky bench`` names them."""
    parser.add_argument(
        "--model",
        default="llama-3.2-1b",
        help=f"{', '.join(shapes.SHAPES)}, or a folder, .gguf, alias or repo for its formats "
        "(default llama-3.2-1b)",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), help="of a shape (default 4)")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help="(default 64)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="(default bfloat16)"
    )
    parser.add_argument(
        "--context",
        type=numbers_from(1),
        default=[1024, 8192],
        help="comma-separated rows that attention sees (default 1024,8192)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        choices=range(1, MAX_ROWS + 1),
        default=1,
        help="consecutive tokens in a step (default 1)",
    )
    parser.add_argument(
        "--ops", type=_op_names, default=list(OPS), help=f"comma-separated, of {', '.join(OPS)}"
    )
    parser.add_argument(
        "-n", "--rounds", type=at_least(1), default=7, help="rounds timed (default 7)"
    )
    parser.add_argument("--json", action="store_true", help="only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table or JSON; 0, or HuskyError naming what failed."""
    platform = graphs.kernel_platform()
    if platform is None:
        raise HuskyError(
            "MLX's default device is the CPU, where no kernels run: there is nothing to time "
            "(husky bench compares whole models here)"
        )
    mx.random.seed(SEED)
    model, settings = load_model(args)
    result = {
        **describe_run(),
        "benchmark": "ops",
        **describe_machine(),
        "chip": asdict(platform.chip),
        "settings": settings,
    }
    cases = Cases(model, platform, args.rows, args.context)
    result["cases"] = time_cases(cases, args.ops, args.rounds, platform)
    result["noisy"] = [
        f"{case['op']} {case['shape']} {key}"
        for case in result["cases"]
        for key in ("us", "stock_us")
        if case["figures"][key]["noisy"]
    ]
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        print_table(result)
    return 0


def load_model(args: argparse.Namespace) -> tuple[Model, dict[str, Any]]:
    """A model with the dimensions and formats asked for, its weights not all read, and what was
    asked for. A shape has one layer, of random weights."""
    given = {name: getattr(args, name) for name in ("bits", "group_size", "dtype")}
    if args.model in shapes.SHAPES:
        defaults = {"bits": 4, "group_size": 64, "dtype": "bfloat16"}
        given = {name: given[name] or default for name, default in defaults.items()}
        config = shapes.shape_config(args.model) | {"num_hidden_layers": 1}
        bits, group_size, dtype = given["bits"], given["group_size"], getattr(mx, given["dtype"])
        if bits < 16:
            config["quantization"] = {"group_size": group_size, "bits": bits}
        weights = shapes.random_weights(config, bits, group_size, dtype, SEED)
        source = args.model
    else:
        for name, value in given.items():
            if value is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs a shape as --model: a checkpoint keeps its own")
        path = sources.resolve(args.model, notify=notice)
        found = checkpoint.read(path)
        config, weights, source = found.config, found.weights, str(path)
    model = build_model(config, weights, lazy=True, source=source)
    assert isinstance(model, Model)
    settings = {
        "model": args.model,
        **given,
        "rows": args.rows,
        "context": args.context,
        "ops": args.ops,
        "rounds": args.rounds,
        "seed": SEED,
    }
    return model, settings


def time_cases(
    cases: Cases, ops: Sequence[str], rounds: int, platform: Platform
) -> list[dict[str, Any]]:
    """The cases of ``ops``, each compared, then timed ``rounds`` times; progress goes to stderr.

    Raises HuskyError for a case whose sides do not agree.
    """
    watch = Stopwatch()
    results = []
    for op in ops:
        for case in cases.of(op):
            results.append(time_case(case, rounds, platform, watch))
            figures = results[-1]["figures"]
            notice(
                f"{op} {case.shape}: {figures['us']['median']:.2f} us, "
                f"stock {figures['stock_us']['median']:.2f}"
            )
            # The copies of the next one need the room.
            del case
            mx.clear_cache()
    return results


def time_case(case: Case, rounds: int, platform: Platform, watch: Stopwatch) -> dict[str, Any]:
    """One case's facts, the summaries of its figures, and the figures of every round."""
    difference = compare(case)
    launches = launches_of(case.bytes)
    compiled = platform.backend != "emulator"  # which runs at once and cannot be traced
    chains = {
        name: Chain(f"{case.op} ({SIDES[name]})", side, launches, watch, compiled)
        for name, side in zip(SIDES, (case.ours, case.stock, floor(platform)), strict=True)
    }
    trials = []
    for turn in interleave(list(chains), rounds):
        trial = {"copy_gb_s": watch.copy_bandwidth()}
        for name in turn:
            trial[f"{name}us"] = chains[name].microseconds()
            trial[f"{name}host_us"] = chains[name].host_microseconds()
        trials.append(trial | derived(trial, case.bytes))
    return {
        **{name: value for name, value in vars(case).items() if name not in ("ours", "stock")},
        "launches": [SHORT, launches],
        "difference": difference,
        "figures": {key: summarise([trial[key] for trial in trials]) for key in trials[0]},
        "trials": trials,
    }


def derived(trial: Mapping[str, float], size: int) -> dict[str, float]:
    """GB/s of ``size`` bytes a launch, percent of the copy's, and how many of ours a stock one
    takes."""
    speed = size / trial["us"] / 1e3
    return {
        "gb_s": speed,
        "percent_of_copy": 100 * speed / trial["copy_gb_s"],
        "stock_ratio": trial["stock_us"] / trial["us"],
    }


def compare(case: Case) -> float:
    """The largest difference of a case's sides, as norms: of all results in floating point.

    Raises HuskyError where it is more than rounding.
    """
    largest = 0.0
    # Stock first: ours writes into the buffers of its state.
    stock, ours = (side.step(0, *side.state) for side in (case.stock, case.ours))
    for a, b in zip(ours, stock, strict=True):
        if not mx.issubdtype(a.dtype, mx.floating):
            continue
        # The sum of a projection is repeated on the stock side.
        x, y = a.astype(mx.float32).reshape(-1), b.astype(mx.float32).reshape(-1)[: a.size]
        error = float((mx.linalg.norm(x - y) / mx.linalg.norm(y)).item())  # type: ignore[arg-type]
        # Not the other way round: NaN is an error.
        if not error <= TOLERANCE[a.dtype]:
            raise HuskyError(
                f"{case.op} {case.shape}: the kernel's result differs from MLX's by {error:.2g} of "
                "its size, its time means nothing"
            )
        largest = max(largest, error)
    return largest


def print_table(result: Mapping[str, Any]) -> None:
    """Print the result for people: a row for each case, with notes above and below."""
    settings, machine, cases = (result[key] for key in ("settings", "machine", "cases"))
    rows = [_row(case) for case in cases]
    rounds = settings["rounds"]
    copy = summarise([trial["copy_gb_s"] for case in cases for trial in case["trials"]])
    print(
        f"{settings['model']}: {settings['rows']} {_plural(settings['rows'], 'row')}, "
        f"{rounds} {_plural(rounds, 'round')}"
    )
    print(f"{result['target']}: {machine['device']}, {machine['cores']} cores, {machine['os']}")
    print(", ".join(f"{name} {number}" for name, number in result["versions"].items()))
    print(f"MLX's copy: {cell(copy)} GB/s")
    print("floor: an empty kernel; host: handing one over; stock: the MLX operations of mlx-lm")
    print(f"us: microseconds a launch, on cold weights\n{spread_words(rounds)}\n")
    header = ["", "shape", "weights", "us", "GB/s", "% of copy", "stock us", "stock / ours"]
    print_rows([*header, "floor", "host"], rows)
    if any(case["ordered"] for case in cases):
        print("\n+ with one small launch more, on both sides, that orders the chain")
    if any(_host_bound(case) for case in cases):
        print("\n> the host needs longer than the GPU: alone this would wait for it")
    if result["noisy"]:
        print(f"\n{noisy_words(result['noisy'])}")


def _row(case: Mapping[str, Any]) -> list[str]:
    figures = case["figures"]

    def median(key: str, digits: int) -> str:
        return f"{figures[key]['median']:.{digits}f}"

    return [
        case["op"] + (" +" if case["ordered"] else ""),
        case["shape"],
        case["weights"],
        cell(figures["us"], 2),
        median("gb_s", 0),
        median("percent_of_copy", 0),
        cell(figures["stock_us"], 2),
        median("stock_ratio", 2),
        median("floor_us", 2),
        median("host_us", 2) + (" >" if _host_bound(case) else ""),
    ]


def _host_bound(case: Mapping[str, Any]) -> bool:
    figures = case["figures"]
    return figures["host_us"]["median"] > figures["us"]["median"]


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _op_names(text: str) -> list[str]:
    names: Sequence[str] = text.split(",")
    if unknown := [name for name in names if name not in OPS]:
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(unknown)}: expected names out of {', '.join(OPS)}"
        )
    return list(dict.fromkeys(names))
