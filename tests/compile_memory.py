"""Peak memory of ``husky compile`` on a checkpoint of a published shape, with random weights.

``python tests/compile_memory.py FOLDER [--shape llama-3.1-8b] [--quant 4bit] [--target m3pro]``
writes the checkpoint and its build into FOLDER (an 8B one needs 22 GB there), prints the peak
resident memory of the process that compiled it, and removes what it wrote. No test: it takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import mlx.core as mx

from husky_mlx.compilation import compile_model
from husky_mlx.quantization import Choice
from husky_mlx.safetensors_writer import write_shards
from husky_mlx.shapes import SHAPES, parameter_shapes, shape_config

_BLOCK = (1 << 20) + 7  # values; no row's length divides it


def write_checkpoint(folder: Path, shape: str) -> None:
    """Bfloat16 weights, one tensor in memory at a time: some random numbers over and over, since to
    draw 8 billion takes longer than to compile them."""
    folder.mkdir(parents=True)
    config = shape_config(shape)
    outline = {name: mx.zeros(size, mx.bfloat16) for name, size in parameter_shapes(config).items()}

    block = mx.random.normal((_BLOCK,), mx.bfloat16)

    def take(name: str) -> mx.array:
        size = outline[name].shape
        if len(size) == 1:
            return mx.ones(size, mx.bfloat16)
        values = mx.tile(block, -(-prod(size) // _BLOCK))[: prod(size)]
        return (size[-1] ** -0.5 * values).astype(mx.bfloat16).reshape(size)

    write_shards(folder, outline, take)
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--quant", default="4bit")
    parser.add_argument("--target", default="m3pro")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    source, build = args.folder / "checkpoint", args.folder / "build"
    if args.compile_only:
        start = time.perf_counter()
        made = compile_model(source, args.target, Choice(args.quant), build)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"{args.shape}, {args.quant}: {made.nbytes / 1e9:.2f} GB in "
            f"{time.perf_counter() - start:.0f} s, peak resident memory {peak / 1e9:.2f} GB, "
            f"of MLX {mx.get_peak_memory() / 1e9:.2f} GB"
        )
        return
    try:
        write_checkpoint(source, args.shape)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--compile-only"], check=True)
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(build, ignore_errors=True)


if __name__ == "__main__":
    main()
