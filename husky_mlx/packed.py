"""A model in fused buffers on disk: what ``compilation`` writes and ``builds`` reads.

The buffers are those that ``pack`` makes when it loads a checkpoint, so that loading them renames,
transposes, quantizes and joins nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from husky_mlx.errors import ArtifactError
from husky_mlx.pack import FUSIONS, Layout, Ready, fuse, groups, layout_of
from husky_mlx.safetensors_writer import write_shards
from husky_mlx.stream import Stream

STEM = "packed"  # not model*: mlx-lm reads every file of that name
LARGEST_FILE = 512 << 20  # files are hashed side by side
_BUFFER = ".buffer"
_DTYPES = {
    str(dtype).removeprefix("mlx.core."): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)
}


@dataclass
class Packing:
    """``layouts``: group as ``pack.groups`` names it -> its buffer; ``outline``: what is written,
    buffers and what is in none of them under mlx-lm's names."""

    layouts: dict[str, Layout]
    outline: dict[str, mx.array]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.outline.values())


def plan_packing(model: nn.Module, frequencies: mx.array) -> Packing:
    """How the parameters of a model are laid out, from dtypes and shapes alone."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    layouts, outline = {}, {}
    packed = set()
    for group, modules, norm, more in groups(model, frequencies):
        layout = layout_of(modules, norm, more)
        if isinstance(layout, str):
            continue
        layouts[group] = layout
        outline[f"{group}{_BUFFER}"] = mx.zeros((layout.words,), mx.uint32)
        paths = paths_of(group)
        packed |= {name for name in parameters if name.rpartition(".")[0] in paths}
        packed |= {_norm_of(group)} if "norm" in layout.parts else set()
    outline |= {name: value for name, value in parameters.items() if name not in packed}
    return Packing(layouts, outline)


def write_packed(
    folder: Path,
    packing: Packing,
    model: nn.Module,
    stream: Stream,
    frequencies: mx.array,
    widened: Mapping[str, mx.Dtype],
    advance: Callable[[int], None],
) -> None:
    """Fill the buffers group by group out of ``stream``, whose layers are taken in order.

    ``model`` has the dtypes and shapes of ``stream``; ``widened``: parameter -> another dtype.
    """
    made = {
        group: (modules, norm, more) for group, modules, norm, more in groups(model, frequencies)
    }

    def parameter(name: str) -> mx.array:
        value = stream.take(name)
        value = value.astype(widened.get(name, value.dtype))
        mx.eval(value)
        return value

    def take(name: str) -> mx.array:
        if not name.endswith(_BUFFER):
            value = parameter(name)
            advance(value.nbytes)
            return value
        group = name.removesuffix(_BUFFER)
        modules, norm, more = made[group]
        before = [dict(module) for module in modules]
        for module, path in zip(modules, paths_of(group), strict=True):
            for part in [part for part in module if f"{path}.{part}" in stream.outline]:
                module[part] = parameter(f"{path}.{part}")
        if "norm" in packing.layouts[group].parts:
            norm = parameter(_norm_of(group))
        buffer = fuse(modules, norm, more).buffer  # type: ignore[union-attr]
        for module, parts in zip(modules, before, strict=True):
            for part, value in parts.items():
                module[part] = value
        advance(buffer.nbytes)
        return buffer

    write_shards(folder, packing.outline, take, STEM, LARGEST_FILE)


def read_packed(
    folder: Path, layouts: Mapping[str, Layout]
) -> tuple[dict[str, mx.array], dict[str, Ready]]:
    """The parameters of a model under mlx-lm's names, as views of the buffers that are returned
    with them."""
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob(f"{STEM}*.safetensors")):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    ready = {}
    for group, layout in layouts.items():
        buffer = weights.pop(f"{group}{_BUFFER}", None)
        if buffer is None or buffer.shape != (layout.words,):
            raise ArtifactError(f"{folder}: {group} should be {layout.words} words; compile again")
        fused = layout.fused(buffer)
        ready[group] = Ready.of(fused)
        for path, views in zip(paths_of(group), ready[group].views, strict=True):
            weights |= {f"{path}.{part}": view for part, view in views.items()}
        if fused.norm is not None:
            weights[_norm_of(group)] = fused.norm
    return weights, ready


def paths_of(group: str) -> list[str]:
    """The matrices of a group, as mlx-lm names them."""
    if group == "lm_head":
        return [group]
    if group == "embed_tokens":
        return [f"model.{group}"]
    layer, _, kind = group.rpartition(".")
    holder, names = FUSIONS[kind]
    return [f"model.{layer}.{holder}.{name}" for name in names]


def layouts_as_json(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    return {
        group: {
            "parts": [
                [name, str(dtype).removeprefix("mlx.core."), list(shape)]
                for name, (dtype, shape) in layout.parts.items()
            ],
            "rows": list(layout.rows),
            "group_size": layout.group_size,
            "bits": layout.bits,
            "mode": layout.mode,
        }
        for group, layout in layouts.items()
    }


def layouts_from_json(content: Mapping[str, Any]) -> dict[str, Layout]:
    return {
        group: Layout(
            parts={name: (_DTYPES[dtype], tuple(shape)) for name, dtype, shape in layout["parts"]},
            rows=tuple(layout["rows"]),
            group_size=layout["group_size"],
            bits=layout["bits"],
            mode=layout["mode"],
        )
        for group, layout in content.items()
    }


def _norm_of(group: str) -> str:
    """The name of the norm that is in a group's buffer, where one is."""
    layer, _, kind = group.rpartition(".")
    if not layer:
        return "model.norm.weight"
    norm = "input_layernorm" if kind == "qkv" else "post_attention_layernorm"
    return f"model.{layer}.{norm}.weight"
