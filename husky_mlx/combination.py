"""What a verdict on the kernels holds for: a chip, a system, versions, sources and shapes."""

from __future__ import annotations

import hashlib
import platform as machine
from importlib.metadata import version
from pathlib import Path
from typing import Any

from husky_mlx import __version__, device
from husky_mlx.fused import FusedLayer, FusedWeights
from husky_mlx.metal_text import kernel_folder
from husky_mlx.ops.gemv import Platform

_TESTED_MODULES = (
    *("policy", "tiles", "layout", "pack", "matrix", "places", "fused"),
    *("prefill", "products", "short_prompt"),
    *("kernels", "kernel_source", "cuda_source", "cuda_binary"),
    *("chain", "cuda_chain", "single_launch", "turns", "pace"),
)


def combination(platform: Platform, weights: FusedWeights, eps: float, of: str) -> str:
    """Everything that the verdict on ``of`` depends on, readable."""
    formats = [matrix_format(weights.embedding), matrix_format(weights.head)]
    formats += [layer_format(layer) for layer in weights.layers]
    shapes = (formats, weights.heads.heads, weights.heads.kv_heads, weights.heads.head_dim)
    tuned = sorted(map(repr, platform.tiles.items()))
    facts = (eps, weights.heads.traditional, weights.heads.magnitude, *tuned)
    return ", ".join(
        (
            f"{platform.backend} on {device.chip()} ({platform.chip.name})",
            _system(),
            "mlx " + version("mlx"),
            f"husky_mlx {__version__}",
            f"kernels {_source_digest()}",
            f"model {_digest(repr((shapes, facts)))}",
            of,
        )
    )


def matrix_format(matrix: Any) -> tuple:
    return (
        matrix.bits,
        matrix.group_size,
        matrix.rows,
        matrix.columns,
        matrix.has_bias,
        str(matrix.dtype),
    )


def layer_format(layer: FusedLayer) -> tuple:
    parts = (layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj)
    return *map(matrix_format, parts), layer.head_norms is not None


def _system() -> str:
    mac = machine.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{machine.system()} {machine.release()}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_digest() -> str:
    """Of the kernels, and of the Python that lays out, launches and cuts what they read."""
    package = Path(__file__).parent
    files = [*kernel_folder().rglob("*.metal"), *kernel_folder().rglob("*.h")]
    files += [package / f"{name}.py" for name in _TESTED_MODULES]
    files += (package / "ops").glob("*.py")
    return _digest("".join(f"{path.name}\n{path.read_text()}" for path in sorted(files)))
