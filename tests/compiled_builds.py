"""Converted models and their builds, for what tests ``husky compile``."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import mlx.core as mx
import numpy as np
from fixtures import FIX_B, PROMPT, mlx_weights, write_folder
from mlx_lm.generate import generate_step

from husky_mlx.compilation import compile_model
from husky_mlx.conversion import convert
from husky_mlx.loading import load
from husky_mlx.quantization import Choice


def converted(folder: Path, config: dict = FIX_B, **options) -> Path:
    source = write_folder(folder / "source", config, mlx_weights(config), tokenizer=True)
    return convert(source, folder / "m.hky", notify=lambda text: None, **options)


def quietly(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(str(folder), **options)


def logits(model) -> np.ndarray:
    return np.array(model(mx.array([PROMPT[:8]]))[0])


def tokens(model) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=8)]


def compiled(source: Path, target: str = "cpu", quant: str | None = None, **options) -> Path:
    choice = Choice(recipe=quant, **options)
    return compile_model(source, target, choice, notify=lambda text: None).path


def hky(tmp_path_factory) -> Path:
    return converted(tmp_path_factory.mktemp("compile"))


def copy(hky, tmp_path) -> Path:
    """The folder without the builds of other tests."""
    return Path(shutil.copytree(hky, tmp_path / "m.hky", ignore=lambda *_: ["builds"]))
