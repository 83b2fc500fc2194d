"""A checkpoint at the bits of a recipe: adapter, sensitivity and rounding before anything is
packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from husky_mlx import checkpoint, recipe
from husky_mlx.adapters import fuse_adapter, targets
from husky_mlx.calibrate_forward import FloatLlama, array_module
from husky_mlx.calibrate_sensitivity import auto
from husky_mlx.calibrate_text import calibration_sequences, calibration_texts
from husky_mlx.calibrate_weights import FloatWeights, PackedWeights
from husky_mlx.errors import UsageError
from husky_mlx.loading import build_model, read_tokenizer
from husky_mlx.recipe import FLOAT_RECIPES, QuantSpec, Tensor
from husky_mlx.requantize import Change, dequantize, requantize, tensors_of
from husky_mlx.rounded import round_stream
from husky_mlx.stream import Stream, open_stream, stream_of

FLOAT_DEFAULT = "4bit"


@dataclass(frozen=True)
class Choice:
    """What a build stores. ``recipe``: a name of ``RECIPES``; None is "keep" for a model that is
    quantized and "4bit" for one that is not. ``budget``: bits per weight, for "auto". ``rounding``:
    a name of ``METHODS``. ``calibration``: a text file instead of the bundled text. ``adapter``:
    the folder of one to fuse in before quantizing."""

    recipe: str | None = None
    budget: float | None = None
    rounding: str = "rtn"
    calibration: str | None = None
    adapter: str | None = None

    def check(self) -> None:
        """Raise UsageError for names and combinations that there are not, before anything is
        read."""
        if self.recipe is not None and self.recipe not in recipe.RECIPES:
            known = ", ".join(recipe.RECIPES)
            raise UsageError(f"unknown recipe {self.recipe!r}, expected one of {known}")
        recipe.check_budget([self.recipe], self.budget)
        if self.calibration is not None and not self.calibrates:
            raise UsageError(
                "calibration text changes nothing here: it is for the recipe 'auto' and the "
                "roundings gptq and awq"
            )

    @property
    def calibrates(self) -> bool:
        return self.recipe == "auto" or self.rounding != "rtn"

    def name(self, tensors: list[Tensor]) -> str:
        """Part of a folder's name: ``4bit``, ``auto-4.5bpw-gptq`` or ``keep+adapter``."""
        words = [self.recipe_of(tensors)]
        words += [f"{self.budget:g}bpw"] if self.budget is not None else []
        words += [self.rounding] if self.rounding != "rtn" else []
        adapter = "" if self.adapter is None else f"+{Path(self.adapter).absolute().name}"
        return "-".join(words) + adapter

    def recipe_of(self, tensors: list[Tensor]) -> str:
        quantized = any(tensor.spec is not None for tensor in tensors)
        return self.recipe or ("keep" if quantized else FLOAT_DEFAULT)


@dataclass(frozen=True)
class Source:
    """A checkpoint to be quantized: ``stored`` says how its file has each matrix, ``weights`` are
    lazy where an adapter is fused into them, else None."""

    path: Path
    stream: Stream
    stored: list[Tensor]
    weights: Mapping[str, mx.array] | None


def open_source(path: Path, adapter: str | None) -> Source:
    """Open a checkpoint, with an adapter fused into its matrices in float32."""
    if adapter is None:
        stream = open_stream(path)
        return Source(path, stream, tensors_of(stream), None)
    found = checkpoint.read(path)
    plain = stream_of(dict(found.config), dict(found.weights), [], str(path))
    stored = tensors_of(plain)
    specs = {tensor.path: tensor.spec for tensor in stored}
    weights = {name: found.weights[name] for name in plain.outline}
    for matrix in targets(adapter):
        if matrix in specs:
            parts = [weights.pop(f"{matrix}.{part}", None) for part in _PARTS]
            floats = [
                part.astype(mx.float32) if mx.issubdtype(part.dtype, mx.floating) else part
                for part in parts
                if part is not None
            ]
            weights[f"{matrix}.weight"] = dequantize(floats, specs[matrix]).astype(mx.float32)
    config = {**found.config, "quantization": None, "quantization_config": None}
    model = build_model(config, dict(weights), lazy=True, source=str(path))
    fuse_adapter(weights, model, adapter)
    stream = stream_of(config, dict(weights), found.notes, str(path))
    return Source(path, stream, stored, weights)


_PARTS = ("weight", "scales", "biases")


def quantize(
    source: Source,
    choice: Choice,
    *,
    report: Callable[[Change], None],
    notify: Callable[[str], None],
) -> Stream:
    """The checkpoint as ``choice`` wants it, each matrix made when it is taken.

    Raises ValueError for a recipe that would raise bits, or a budget that no choice meets.
    """
    name = choice.recipe_of(source.stored)
    stream, stored = source.stream, source.stored
    if name in FLOAT_RECIPES:
        allocation = recipe.resolve(name, stored)
        dtype = getattr(mx, FLOAT_RECIPES[name])
        return requantize(stream, allocation, dtype, report=report)
    tokens = llama = None
    if choice.calibrates:
        tokenizer = read_tokenizer(source.path, None, source.stream.config.get("eos_token_id"))
        texts = calibration_texts(choice.calibration)
        tokens = calibration_sequences(tokenizer, texts)
        llama = FloatLlama(stream.args, _float_weights(source), array_module())
        notify(f"calibrating on {tokens.size} tokens of {', '.join(texts)}")
    floats = _dtype_of(source)
    if name == "auto":
        assert llama is not None and tokens is not None and choice.budget is not None
        allocation = auto(llama, stored, choice.budget, choice.rounding, tokens, floats)
    else:
        allocation = recipe.resolve(name, stored)
    if choice.rounding != "rtn":
        assert llama is not None and tokens is not None
        return round_stream(
            stream, allocation, llama, choice.rounding, tokens, floats, report=report
        )
    # What an adapter was fused into is in float32.
    fused = [] if choice.adapter is None else targets(choice.adapter)
    return requantize(stream, allocation, floats=dict.fromkeys(fused, floats), report=report)


def _dtype_of(source: Source) -> mx.Dtype:
    """That of the floats of the source: the embedding's or its scales'."""
    name = "model.embed_tokens"
    outline = source.stream.outline
    dtype = outline.get(f"{name}.scales", outline[f"{name}.weight"]).dtype
    return mx.bfloat16 if dtype == mx.uint8 else dtype


def _float_weights(source: Source) -> Mapping[str, Any]:
    if source.weights is None:
        return FloatWeights(source.path, array_module())
    specs: dict[str, QuantSpec | None] = {t.path: t.spec for t in tensors_of(source.stream)}
    return PackedWeights(source.weights, specs, array_module())
