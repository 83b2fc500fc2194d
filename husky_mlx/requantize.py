"""From the bits that a checkpoint has to those that a recipe wants, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from husky_mlx.recipe import QuantSpec, Tensor
from husky_mlx.stream import Stream, in_model_order
from husky_mlx.structure import MX_FORMATS, expected_shapes

Allocation = Mapping[str, QuantSpec | None]
_VALUES_AT_ONCE = 1 << 24
_HALF_RANGE = 65504.0


@dataclass(frozen=True)
class Change:
    """What became of one matrix. ``error``: the root of the mean squared difference over that of
    the source's values, 0 where nothing was rounded, None where the two cannot be compared."""

    tensor: Tensor
    spec: QuantSpec | None
    nbytes: int
    error: float | None


def losses(changes: Sequence[Change]) -> str | None:
    """What to tell a user whose model was quantized already and has been again."""
    lowered = [change for change in changes if change.error and change.tensor.spec is not None]
    if not lowered:
        return None
    worst = max(lowered, key=lambda change: change.error or 0.0)
    were = "1 matrix was" if len(lowered) == 1 else f"{len(lowered)} matrices were"
    return (
        f"{were} quantized already and quantized again: values are off "
        f"by up to {worst.error:.2%} (root mean square, {worst.tensor.path})"
    )


def tensors_of(stream: Stream) -> list[Tensor]:
    """Every matrix of a checkpoint, in the order of the model, as it is stored."""
    args = stream.args
    tensors = []
    for name, shape in expected_shapes(args).items():
        if len(shape) == 2:
            path = name.removesuffix(".weight")
            layer = int(path.split(".")[2]) if path.startswith("model.layers.") else None
            role = _ROLES.get(path) or path.rsplit(".", 1)[-1]
            spec = _stored(path, shape[1], stream.outline)
            tensors.append(Tensor(path, (shape[0], shape[1]), role, layer, spec))
    return tensors


_ROLES = {"model.embed_tokens": "embedding", "lm_head": "head"}


def _stored(path: str, columns: int, outline: Mapping[str, mx.array]) -> QuantSpec | None:
    scales = outline.get(f"{path}.scales")
    if scales is None:
        return None
    bits = outline[f"{path}.weight"].shape[1] * 32 // columns
    group = columns // scales.shape[1]
    mode = MX_FORMATS[bits, group] if scales.dtype == mx.uint8 else "affine"
    return QuantSpec(bits, group, mode)


def requantize(
    stream: Stream,
    allocation: Allocation,
    dtype: mx.Dtype | None = None,
    *,
    floats: Mapping[str, mx.Dtype] | None = None,
    report: Callable[[Change], None] = lambda change: None,
) -> Stream:
    """The same checkpoint with each matrix rounded to the spec of ``allocation`` when it is taken.

    A matrix that has as many bits already stays as it is, whatever its groups: rounding it again
    would cost and save nothing. ``dtype`` of floats, scales and biases; theirs unless given, and
    ``floats`` for a matrix that is in it. ``report`` gets each matrix when it is done. ValueError
    where a value is too large for its dtype.
    """
    tensors = {tensor.path: tensor for tensor in tensors_of(stream)}
    specs = kept_or(tensors, allocation)
    dtypes = dict.fromkeys(tensors, dtype) | dict(floats or {})

    def read(name: str) -> dict[str, mx.array]:
        path = name.rpartition(".")[0]
        if path not in tensors or name.endswith(".bias"):
            return {name: _cast(name, stream.take(name), dtype)}
        stored = [stream.take(part) for part in _parts(path) if part in stream.outline]
        made, error = _convert(path, stored, tensors[path].spec, specs[path], dtypes[path])
        found = dict(zip(_parts(path), made, strict=False))
        report(Change(tensors[path], specs[path], sum(v.nbytes for v in made), error))
        return found

    config = quantized_config(stream.config, specs)
    if dtype is not None:
        config |= {key: _name(dtype) for key in ("dtype", "torch_dtype") if key in config}
    outline = outline_of(stream, tensors, specs, dtypes, dtype)
    return Stream(config, in_model_order(stream.args, outline), stream.notes, read)


def _parts(path: str) -> list[str]:
    return [f"{path}.{part}" for part in ("weight", "scales", "biases")]


def kept_or(tensors: Mapping[str, Tensor], allocation: Allocation) -> dict[str, QuantSpec | None]:
    """The allocation, with a matrix's own spec where it has as many bits already."""
    specs: dict[str, QuantSpec | None] = {}
    for path, tensor in tensors.items():
        wanted = specs[path] = allocation[path]
        if tensor.spec is not None and wanted is not None and tensor.spec.bits == wanted.bits:
            specs[path] = tensor.spec
    return specs


def quantized_config(
    config: Mapping[str, Any], specs: Mapping[str, QuantSpec | None]
) -> dict[str, Any]:
    """A config.json whose ``quantization`` says what each matrix has, as mlx-lm reads it."""
    config = {
        key: value
        for key, value in config.items()
        if key not in ("quantization", "quantization_config")
    }
    counts = Counter(spec for spec in specs.values() if spec is not None)
    if not counts:
        return config
    common = counts.most_common(1)[0][0]
    config["quantization"] = _entry(common) | {
        path: False if spec is None else _entry(spec)
        for path, spec in specs.items()
        if spec != common
    }
    return config


def _entry(spec: QuantSpec) -> dict[str, Any]:
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}


def outline_of(
    stream: Stream,
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, QuantSpec | None],
    dtypes: Mapping[str, mx.Dtype | None],
    dtype: mx.Dtype | None,
) -> dict[str, mx.array]:
    """Dtype and shape of each parameter once its matrix has the spec and the dtype given; ``dtype``
    is that of what is no matrix."""
    outline = {}
    for name, value in stream.outline.items():
        path, _, part = name.rpartition(".")
        if path not in tensors or part == "bias":
            outline[name] = mx.zeros(value.shape, _target(value.dtype, dtype))
        elif specs[path] == tensors[path].spec:
            outline[name] = mx.zeros(value.shape, _target(value.dtype, dtypes[path]))
    for path, tensor in tensors.items():
        spec = specs[path]
        if spec == tensor.spec:
            continue
        stored = stream.outline.get(f"{path}.scales", stream.outline[f"{path}.weight"]).dtype
        floats = _target(mx.bfloat16 if stored == mx.uint8 else stored, dtypes[path])
        rows, columns = tensor.shape
        if spec is None:
            outline[f"{path}.weight"] = mx.zeros((rows, columns), floats)
            continue
        outline[f"{path}.weight"] = mx.zeros((rows, columns * spec.bits // 32), mx.uint32)
        groups = (rows, columns // spec.group_size)
        affine = spec.mode == "affine"
        outline[f"{path}.scales"] = mx.zeros(groups, floats if affine else mx.uint8)
        if affine:
            outline[f"{path}.biases"] = mx.zeros(groups, floats)
    return outline


def _convert(
    path: str,
    stored: list[mx.array],
    had: QuantSpec | None,
    wanted: QuantSpec | None,
    dtype: mx.Dtype | None,
) -> tuple[list[mx.array], float]:
    """The parts of one matrix at another spec, and the relative error of that."""
    if had == wanted:
        return [_cast(path, value, dtype) for value in stored], 0.0
    if wanted is None:
        return [_cast(path, dequantize(stored, had), dtype)], 0.0
    rows, words = stored[0].shape
    step = max(_VALUES_AT_ONCE // (words if had is None else words * 32 // had.bits), 1)
    pieces, total = [], (0.0, 0.0)
    for start in range(0, rows, step):
        weight = _cast(path, dequantize([x[start : start + step] for x in stored], had), dtype)
        piece = mx.quantize(weight, wanted.group_size, wanted.bits, mode=wanted.mode)
        mx.eval(piece)
        squares = squares_of(weight, dequantize(list(piece), wanted))
        total = (total[0] + squares[0], total[1] + squares[1])
        pieces.append(piece)
    made = [mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True)]
    mx.eval(made)
    return made, relative(total)


def dequantize(parts: Iterable[mx.array], spec: QuantSpec | None) -> mx.array:
    """The floats of a matrix that is stored as ``spec`` says."""
    weight, *rest = parts
    if spec is None:
        return weight
    scales, biases = rest[0], rest[1] if len(rest) > 1 else None
    return mx.dequantize(weight, scales, biases, spec.group_size, spec.bits, mode=spec.mode)


def squares_of(source: mx.array, rounded: mx.array) -> tuple[float, float]:
    """The sums of the squared differences and of the source's squares."""
    source = source.astype(mx.float32)
    difference = (rounded.astype(mx.float32) - source).square().sum()
    return _number(difference), _number(source.square().sum())


def relative(squares: tuple[float, float]) -> float:
    """The error of ``Change`` from such sums."""
    return (squares[0] / squares[1]) ** 0.5 if squares[1] else 0.0


def _target(stored: mx.Dtype, dtype: mx.Dtype | None) -> mx.Dtype:
    return dtype if dtype is not None and mx.issubdtype(stored, mx.floating) else stored


def _cast(name: str, value: mx.array, dtype: mx.Dtype | None) -> mx.array:
    target = _target(value.dtype, dtype)
    if target == mx.float16 and value.dtype in (mx.float32, mx.bfloat16):
        largest = _number(mx.abs(value).max())
        if not largest <= _HALF_RANGE:
            raise ValueError(
                f"{name} has values up to {largest:g}, and float16 ends at {_HALF_RANGE:g}: "
                "take bfloat16"
            )
    return value.astype(target)


def _number(value: mx.array) -> float:
    return float(value.item())  # type: ignore[arg-type]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
