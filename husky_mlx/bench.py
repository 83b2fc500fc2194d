"""``husky bench``: engines compared on the same weights and the same token ids."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from husky_mlx import bench_plot
from husky_mlx.arguments import at_least, numbers_from
from husky_mlx.bench_predict import parse_chips, predict, print_prediction
from husky_mlx.bench_report import BASELINE, LLAMA_CPP, SIXTEEN_BIT, describe_run
from husky_mlx.bench_run import ENGINES, SEED, compare
from husky_mlx.bench_table import print_table
from husky_mlx.errors import HuskyError, UsageError, exit_code
from husky_mlx.interrupts import interrupted_by_termination
from husky_mlx.notices import notice
from husky_mlx.shapes import SHAPES, shape_config

DEFAULT_ENGINES = (SIXTEEN_BIT, BASELINE, "husky", LLAMA_CPP)
MOST_TOKENS = 1 << 24  # beyond any model's context
# Left out where they would show nothing, do not fit or are not there, unless they were asked for.
OPTIONAL_ENGINES = (SIXTEEN_BIT, LLAMA_CPP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``husky bench``, named as mlx-lm's benchmark names them."""
    parser.epilog = "husky bench ops times kernel by kernel; it has options of its own"
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", default="smollm2", help="folder, .gguf, alias or repo (default smollm2)"
    )
    model.add_argument("--shape", choices=SHAPES, help="random weights of these dimensions instead")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), help="with --shape (default 4)")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help="(default 64)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="(default bfloat16)"
    )
    parser.add_argument(
        "-p",
        "--prompt-tokens",
        type=numbers_from(1),
        help="comma-separated prompt lengths (default 64 on the CPU, else 1024)",
    )
    parser.add_argument(
        "-g",
        "--generation-tokens",
        type=numbers_from(2),
        help="comma-separated numbers of tokens to generate (default 32 on the CPU, else 512)",
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        type=numbers_from(1),
        default=[1],
        help="comma-separated numbers of sequences at once; more than 1 by mlx-lm's batch loop on "
        "both sides (default 1)",
    )
    parser.add_argument(
        "--prompt-file", help="a text to read instead of random tokens; -p takes its beginning"
    )
    parser.add_argument(
        "-n", "--num-trials", type=at_least(1), help="rounds timed (default 3 on the CPU, else 5)"
    )
    parser.add_argument(
        "--engines",
        type=_engine_names,
        help=f"comma-separated, of {', '.join(ENGINES)} (default {','.join(DEFAULT_ENGINES)}, "
        f"{' and '.join(OPTIONAL_ENGINES)} where they can run)",
    )
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus, with --temp (default 1)")
    parser.add_argument(
        "--predict",
        metavar="CHIPS",
        help="time nothing: the roofs of these chips, as in m1,m3pro,m4max-40c (default -p 1024 "
        "-g 512)",
    )
    parser.add_argument("--memory", metavar="SIZE", help="with --predict, as in 16gb")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="only JSON on stdout")
    output.add_argument("--markdown", action="store_true", help="the tables as Markdown")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figures too")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its tables or JSON; 0, or HuskyError naming what failed."""
    settings = _settings(args)
    if args.predict is not None:
        if args.plot or args.prompt_file or args.engines or args.batch_size != [1]:
            raise UsageError("--predict takes no --plot, --prompt-file, --engines or -b")
        result = describe_run() | predict(settings, parse_chips(args.predict, args.memory))
        printer: Any = print_prediction
    else:
        if args.memory is not None:
            raise UsageError("--memory needs --predict: this machine has what it has")
        if args.plot:
            bench_plot.require(Path(args.plot))
        names = args.engines or DEFAULT_ENGINES
        optional = () if args.engines else OPTIONAL_ENGINES
        try:
            result = describe_run() | compare(names, settings, optional)
        except KeyboardInterrupt:
            notice("interrupted: no round was complete, there is nothing to report")
            raise
        printer = print_table
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        printer(result, markdown=args.markdown)
    if args.plot:
        bench_plot.draw(result, Path(args.plot))
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the engines are told, checked."""
    for name in ("backend", "max_context", "max_kv_size"):
        if getattr(args, name, None) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not apply here: use --engines")
    if not 0 <= args.temp < math.inf:
        raise UsageError(f"--temp must be a number from 0 up, found {args.temp}")
    if not 0 < args.top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, found {args.top_p}")
    if args.prompt_file is not None and args.shape:
        raise UsageError("--prompt-file needs --model: a --shape has no tokenizer for texts")
    tokens = max(args.prompt_tokens or [0]) * max(args.batch_size)
    if tokens > MOST_TOKENS:
        raise UsageError(f"{tokens:,} tokens in a prompt, -p times -b: at most {MOST_TOKENS:,}")
    defaults = {"bits": 4, "group_size": 64, "dtype": "bfloat16"}
    weights = {name: getattr(args, name) for name in defaults}
    if args.shape:
        weights = {name: weights[name] or default for name, default in defaults.items()}
    for name, value in weights.items():
        if value is not None and not args.shape:
            raise UsageError(f"--{name.replace('_', '-')} needs --shape: a model keeps its own")
    return {
        "model": args.shape or args.model,
        "config": shape_config(args.shape) if args.shape else None,
        **weights,
        "prompt_tokens": args.prompt_tokens,
        "generation_tokens": args.generation_tokens,
        "batch": args.batch_size,
        "prompt_file": args.prompt_file and str(Path(args.prompt_file).absolute()),
        "num_trials": args.num_trials,
        "temp": args.temp,
        "top_p": args.top_p,
        "seed": SEED,
        "debug": getattr(args, "debug", False),
    }


def _engine_names(text: str) -> Sequence[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ENGINES]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected different names out of {', '.join(ENGINES)}, found {text}"
        )
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m husky_mlx.bench", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the engines' tracebacks")
    try:
        with interrupted_by_termination():
            return run(parser.parse_args())
    except (HuskyError, ValueError, OSError) as error:
        notice(f"error: {error}")
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
