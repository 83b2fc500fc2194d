"""One Llama-family model through a frozen graph: ``from husky_mlx import load, generate``.

Every name that ``mlx_lm`` exports can be imported from here: ``load``, ``generate`` and
``stream_generate`` are ours, the rest is mlx-lm's own. Nothing heavy is imported before its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from husky_mlx.generation import generate, stream_generate
    from husky_mlx.loading import load

__version__ = "0.1.0"
__all__ = ["__version__", "generate", "load", "stream_generate"]


def __dir__() -> list[str]:
    import mlx_lm

    return sorted({*globals(), *__all__, *mlx_lm.__all__})


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in __all__:
        from husky_mlx.contract import entry_point

        return entry_point(name)
    import mlx_lm

    if name in mlx_lm.__all__:
        return getattr(mlx_lm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
