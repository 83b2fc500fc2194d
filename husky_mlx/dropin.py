"""mlx-lm's own commands on our model: installed by the command line, never by ``import husky_mlx``.

Two doors are changed while a ``DropIn`` is installed, and both are put back afterwards:

* ``mlx_lm.utils.MODEL_REMAPPING`` sends each supported model type to a module that builds our
  model, for the code that calls ``load_model`` (``sharded_load`` does);
* ``load``, ``load_tokenizer``, ``load_prompt_cache``, ``generate`` and ``stream_generate`` are
  replaced wherever a loaded mlx-lm module has bound them, so that every ``--model`` takes an alias
  or a ``.gguf`` file.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm.utils
from mlx_lm.models.cache import load_prompt_cache

from husky_mlx import generate, gguf_tokenizer, load, sources, stream_generate, switches
from husky_mlx.config import SUPPORTED_MODEL_TYPES, LlamaConfig
from husky_mlx.contract import violations
from husky_mlx.errors import CheckpointError, UnsupportedModel, UsageError
from husky_mlx.model import Model
from husky_mlx.notices import notice
from husky_mlx.prompt_progress import prompt_progress
from husky_mlx.switches import BACKENDS

MODULE = "mlx_lm.models.husky_llama"

# Set while our load runs: it has decided by itself, so a model class that it asks mlx-lm for must
# be mlx-lm's, and the notice has been given.
_inside_load: ContextVar[bool] = ContextVar("inside husky_mlx.load", default=False)


class DropIn:
    """mlx-lm in this process, on our model, from ``install`` to ``uninstall`` (or in ``with``).

    ``backend`` "mlx" keeps mlx-lm's model class and loop, and still accepts aliases and ``.gguf``;
    None takes ``$HUSKY_BACKEND``. ``max_context`` and ``max_kv_size`` (tokens) go to every load.
    ``announce`` prints the name of the next model that is loaded. The attributes may be changed
    until the first load. Raises ValueError for an unknown backend.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        max_context: int | None = None,
        max_kv_size: int | None = None,
        announce: bool = False,
    ):
        self.backend = backend
        self.max_context = max_context
        self.max_kv_size = max_kv_size
        self.announce = announce
        self._replaced: list[tuple[Callable, Callable]] = []
        self._remapped: dict[str, str | None] = {}
        self._noticed: set[str] = set()

    def install(self) -> None:
        """Change both doors. Raises RuntimeError if a DropIn is installed already."""
        if MODULE in sys.modules:
            raise RuntimeError("mlx-lm already runs on husky_mlx in this process")
        violations()  # asked once a process, and of mlx-lm as it is without us
        utils = mlx_lm.utils
        self._replaced = [
            (utils.load, functools.partial(self._load, utils.load)),
            (utils.load_tokenizer, functools.partial(_load_tokenizer, utils.load_tokenizer)),
            (
                mlx_lm.stream_generate,
                functools.partial(self._choose, stream_generate, mlx_lm.stream_generate),
            ),
            (
                mlx_lm.generate,
                functools.partial(self._choose, generate, mlx_lm.generate),
            ),
            (
                load_prompt_cache,
                functools.partial(_load_prompt_cache, load_prompt_cache),
            ),
        ]
        for original, ours in self._replaced:
            _rebind(original, ours)
        remapping = utils.MODEL_REMAPPING
        self._remapped = {kind: remapping.get(kind) for kind in SUPPORTED_MODEL_TYPES}
        sys.modules[MODULE] = _model_module(
            {kind: target or kind for kind, target in self._remapped.items()}, self
        )
        remapping.update(dict.fromkeys(SUPPORTED_MODEL_TYPES, MODULE.rpartition(".")[2]))

    def uninstall(self) -> None:
        """Put everything back, in modules that were imported meanwhile too."""
        for original, ours in self._replaced:
            _rebind(ours, original)
        for kind, target in self._remapped.items():
            if target is None:
                mlx_lm.utils.MODEL_REMAPPING.pop(kind, None)
            else:
                mlx_lm.utils.MODEL_REMAPPING[kind] = target
        sys.modules.pop(MODULE, None)
        self._replaced, self._remapped = [], {}

    def __enter__(self) -> DropIn:
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        self.uninstall()

    @property
    def chosen_backend(self) -> str:
        """``backend``, else ``$HUSKY_BACKEND``, else "husky"; "mlx" for an mlx-lm we do not fit."""
        backend = self.backend or switches.BACKEND.read() or "husky"
        if backend not in BACKENDS:
            raise UsageError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
        return "mlx" if violations() else backend

    def _load(self, stock: Callable, path_or_hf_repo: str, *arguments: Any, **options: Any) -> Any:
        if _inside_load.get():
            return stock(path_or_hf_repo, *arguments, **options)
        if path_or_hf_repo is None:
            raise UsageError("no --model given, and this command has no default")
        if self.announce:
            self.announce = False
            notice(f"no --model given: using {path_or_hf_repo}")
        path = str(sources.resolve(str(path_or_hf_repo), options.get("revision"), notify=notice))
        ours = {"max_context": self.max_context, "max_kv_size": self.max_kv_size, **options}
        token = _inside_load.set(True)
        try:
            if self.chosen_backend == "husky":
                try:
                    # None where nobody asked: then husky doctor's choice is followed.
                    return load(path, *arguments, **ours, backend=self.backend)
                except UnsupportedModel as error:
                    if path.endswith(".gguf"):
                        raise
                    self.notice_stock(str(path_or_hf_repo), error)
            return load(path, *arguments, **options, backend="mlx")
        finally:
            _inside_load.reset(token)

    def notice_stock(self, source: str, error: UnsupportedModel) -> None:
        """Say once per model that mlx-lm's class runs it, and why."""
        limit = f" (max_context {self.max_context} has no effect)" if self.max_context else ""
        text = f"{source} runs on mlx-lm's model class{limit}: {'; '.join(error.differences)}"
        if text not in self._noticed:
            self._noticed.add(text)
            notice(text)

    def _choose(self, ours: Callable, stock: Callable, *arguments: Any, **options: Any) -> Any:
        if self.chosen_backend != "husky":
            return stock(*arguments, **options)
        if options.get("prompt_progress_callback") is None:
            options["prompt_progress_callback"] = prompt_progress()
        return ours(*arguments, **options)


def _rebind(old: Callable, new: Callable) -> None:
    for name, module in list(sys.modules.items()):
        if name == "mlx_lm" or name.startswith("mlx_lm."):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _load_tokenizer(stock: Callable, model_path: Any, *arguments: Any, **options: Any) -> Any:
    name = str(model_path)
    if sources.alias(name) or name.endswith(".gguf"):
        path = sources.resolve(name)
        if path.suffix == ".gguf":
            extra = arguments[0] if arguments else options.get("tokenizer_config_extra")
            return gguf_tokenizer.load_tokenizer(path, extra)
        model_path = path
    return stock(model_path, *arguments, **options)


def _load_prompt_cache(stock: Callable, file_name: str, *arguments: Any, **options: Any) -> Any:
    """mlx-lm's, with the file in the message of whatever it stumbles over."""
    try:
        return stock(file_name, *arguments, **options)
    except Exception as error:
        reason = str(error) if Path(file_name).is_file() else "no such file"
        raise CheckpointError(f"{file_name}: not a saved prompt cache: {reason}") from error


def _model_module(stock_types: Mapping[str, str], dropin: DropIn) -> types.ModuleType:
    """The module that ``mlx_lm.utils._get_classes`` finds: ``Model`` and ``ModelArgs``."""

    class ModelArgs:
        """``from_dict`` gives a LlamaConfig, or mlx-lm's own arguments where ours do not reach."""

        @staticmethod
        def from_dict(config: dict) -> Any:
            if not _inside_load.get() and dropin.chosen_backend == "husky":
                try:
                    return LlamaConfig.from_dict(config)
                except UnsupportedModel as error:
                    dropin.notice_stock(error.source, error)
            stock = importlib.import_module(f"mlx_lm.models.{stock_types[config['model_type']]}")
            return stock.ModelArgs.from_dict(config)

    def build(args: Any) -> nn.Module:
        """Our model for a LlamaConfig, else the class of the mlx-lm module that made ``args``."""
        if isinstance(args, LlamaConfig):
            return Model(args)
        return importlib.import_module(type(args).__module__).Model(args)

    # mlx-lm imports the module that a model class names, to look for tokenizer defaults.
    build.__module__ = ModelArgs.__module__ = MODULE
    module = types.ModuleType(MODULE, "The model class that mlx-lm finds while husky runs it.")
    module.Model, module.ModelArgs = build, ModelArgs  # type: ignore[attr-defined]
    return module
