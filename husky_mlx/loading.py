"""``load``: a checkpoint, checked, built, fused and ready to decode; and the same for mlx-lm."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import infer_quant_config, load_tokenizer
from mlx_lm.utils import load as stock_load

from husky_mlx import (
    artifact,
    builds,
    checkpoint,
    choices,
    foreign,
    gguf_tokenizer,
    sources,
    switches,
)
from husky_mlx.adapters import load_adapter
from husky_mlx.config import LlamaConfig
from husky_mlx.device import activation_dtype
from husky_mlx.errors import CheckpointError, UnsupportedModel, UsageError
from husky_mlx.memory import megabytes, require_memory
from husky_mlx.model import SINK_TOKENS, Model
from husky_mlx.notices import notice
from husky_mlx.request import check_size
from husky_mlx.structure import check_structure, drop_unread
from husky_mlx.switches import BACKENDS
from husky_mlx.warmup import warm_up

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    backend: str | None = None,
    max_context: int | None = None,
    max_kv_size: int | None = None,
    fallback: str | None = None,
    quant: str | None = None,
    verbose: bool = False,
    warm: bool = True,
) -> tuple[Any, ...]:
    """Load a model and its tokenizer: (model, tokenizer), or with ``return_config`` the config too.

    The first eight arguments are ``mlx_lm.load``'s. ``path_or_hf_repo`` may also be a .gguf file,
    the alias "smollm2", a .hky folder or a build in one. Of a .hky folder the build for this
    machine is taken, or its own weights where there is none. ``adapter_path`` may be PEFT's too.

    ``backend``: "husky", or "mlx" for mlx-lm's own class. By default $HUSKY_BACKEND, else what
    ``husky doctor --model`` found fastest here, which the plan says, else "husky".
    ``max_context``: the most tokens of prompt and reply together.
    ``max_kv_size``: keep the first 4 and the last tokens, this many in all, in a rotating cache.
    ``fallback``: "mlx" loads with mlx-lm what husky_mlx does not support, instead of raising.
    ``quant``: a recipe of ``husky compile``; what it makes is kept in the cache folder, and an
    adapter is then fused in before it is quantized.
    ``verbose``: one line to stderr about what runs where.
    ``warm``: on a GPU run a few tokens, so that the first reply does not wait for what they compile
    and load; the plan says how long that took.

    ``lazy`` leaves the weights of a folder unread until their first use; a .gguf file and a build
    are read at once.

    Raises UnsupportedModel with the exact differences, CheckpointError for damaged files,
    SourceError for a model that cannot be had, MemoryLimitError for one that does not fit,
    SwitchError for a variable of ours that is set to what it does not take.
    """
    switches.check()
    asked = backend or switches.BACKEND.read()
    backend = _choice("backend", asked or "husky")
    if fallback is not None and fallback != "mlx":
        raise UsageError(f"fallback must be None or 'mlx', found {fallback!r}")
    stock_reason = "backend is mlx"
    _check_limits(max_context, max_kv_size)
    path = sources.resolve(
        os.fsdecode(path_or_hf_repo), revision=revision, notify=notice if verbose else None
    )
    build, notes = _build_for(path, quant, adapter_path)

    def load_stock(reason: str) -> tuple[Any, ...]:
        if verbose:
            notice(f"{path} runs on mlx-lm's model class: {reason}")
        return stock_load(
            str(path),
            tokenizer_config=tokenizer_config,
            model_config=model_config,
            adapter_path=adapter_path,
            lazy=lazy,
            return_config=return_config,
            trust_remote_code=trust_remote_code,
        )

    if backend == "mlx" and path.is_dir() and build is None:
        artifact.verify(path)
        return load_stock(stock_reason)
    if build is not None:
        path, adapter_path = build, None if quant else adapter_path
    try:
        found = (
            builds.read_build(build, model_config) if build else checkpoint.read(path, model_config)
        )
        choice = None if asked else choices.remembered(found.config)
        if choice is not None and choice.way == choices.STOCK:
            if max_context or max_kv_size:
                choice = None  # ours alone has such limits
            else:
                backend, stock_reason = "mlx", f"chosen: {choice}"
                if not verbose:
                    notice(f"{path} runs on mlx-lm's model class: {stock_reason}")
        if backend == "mlx" and path.is_dir() and build is None:
            return load_stock(stock_reason)
        model = build_model(
            found.config,
            found.weights,
            backend=backend,
            lazy=True,
            source=str(path),
            max_context=max_context,
            max_kv_size=max_kv_size,
        )
    except UnsupportedModel as error:
        if fallback is None or not path.is_dir():
            raise
        return load_stock("; ".join(error.differences))
    held = 0 if found.lazy else _bytes_of(model)
    config = found.config
    for note in [*notes, *(f"{path}: {note}" for note in found.notes)]:
        warnings.warn(note, stacklevel=2)
    packed = (found.ready, found.tiles) if isinstance(found, builds.Build) else ()
    del found
    if choice is not None and isinstance(model, Model):
        model.follow(choice)
    if adapter_path is not None:
        model = load_adapter(model, adapter_path)
    tokenizer = read_tokenizer(path, tokenizer_config, config.get("eos_token_id"))
    if not lazy:
        _materialize(model, str(path), held)
        if isinstance(model, Model):
            if warm:
                model.plan.warm_up = warm_up(model, *packed)
            else:
                model.prepare(*packed)
    if verbose:
        plan = getattr(model, "plan", None)
        words = plan.summary if plan else f"{path} runs on mlx-lm's model class: {stock_reason}"
        notice(words.replace("\n", " | "))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def build_model(
    config: dict[str, Any],
    weights: dict[str, mx.array],
    *,
    backend: str = "husky",
    lazy: bool = False,
    source: str = "config.json",
    max_context: int | None = None,
    max_kv_size: int | None = None,
) -> nn.Module:
    """A model from a config and (lazy) weights under mlx-lm's names; ``weights`` is emptied.

    ``backend`` "mlx" builds mlx-lm's own class from the same weights. Unless ``lazy``, the
    weights are read and the projections fused layer by layer: the peak is the weights and two
    layers. Raises UnsupportedModel and CheckpointError naming ``source``.
    """
    config_source = str(Path(source, "config.json")) if Path(source).is_dir() else source
    refuse_foreign_quantization(config, config_source)
    llama_config = LlamaConfig.from_dict(config, config_source)
    kept = drop_unread(weights, llama_config.tie_word_embeddings)
    weights.clear()
    check_structure(llama_config, kept, source)
    model: nn.Module
    if backend == "husky":
        model = Model(llama_config, max_context=max_context, max_kv_size=max_kv_size)
    else:
        stock = importlib.import_module(f"mlx_lm.models.{llama_config.stock_module}")
        model = stock.Model(stock.ModelArgs.from_dict(config))

    def storage(path: str, module: nn.Module) -> bool | dict[str, Any]:
        quantized = f"{path}.scales" in kept and hasattr(module, "to_quantized")
        return infer_quant_config(path, module, kept) if quantized else False

    nn.quantize(model, class_predicate=storage)
    model.eval()
    model.load_weights(list(kept.items()))
    if not lazy:
        kept.clear()
        _materialize(model, source)
        if isinstance(model, Model):
            model.prepare()
    return model


def read_tokenizer(
    path: Path,
    settings: dict[str, Any] | None = None,
    stop_tokens: int | list[int] | None = None,
) -> TokenizerWrapper:
    """The tokenizer of a folder or .gguf file; ``stop_tokens`` are those of a folder's config.

    Raises CheckpointError naming the file where none can be built.
    """
    if path.is_file():
        return gguf_tokenizer.load_tokenizer(path, settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        checkpoint.read_json(path / name)
    try:
        return load_tokenizer(path, settings, eos_token_ids=stop_tokens)
    except Exception as error:  # transformers and tokenizers raise every kind, Exception itself too
        files = [name for name in _TOKENIZER_FILES if (path / name).exists()]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"{path}: no tokenizer can be built from {', '.join(files) or 'no tokenizer file'}, "
            f"expected tokenizer.json or tokenizer.model ({reason})"
        ) from error


def _build_for(path: Path, quant: str | None, adapter: str | None) -> tuple[Path | None, list[str]]:
    """The build to load instead of ``path``, made now if need be, and what to warn of."""
    if quant is None:
        return builds.find_build(path)
    # It builds models with this module's functions.
    from husky_mlx.build_cache import cached_build

    return cached_build(path, quant, adapter), []


def _materialize(model: nn.Module, source: str, held: int = 0) -> None:
    """Read what is not read yet, in the dtypes that the step takes.

    ``held``: how many bytes of the weights are in memory already.
    """
    if isinstance(model, Model):
        _widen_scales(model)
    parameters = dict(tree_flatten(model.parameters()))
    require_memory(_bytes_of(model) - held, f"Loading {source}", _smaller(parameters))
    del parameters
    mx.eval(model.parameters())


def _bytes_of(model: nn.Module) -> int:
    return sum(value.nbytes for value in dict(tree_flatten(model.parameters())).values())


def _widen_scales(model: Model) -> None:
    """Scales and biases in the activation dtype: on the CPU MLX would convert them every token."""
    for module in model.modules():
        for name in ("scales", "biases"):
            if name in module and activation_dtype(module[name].dtype) != module[name].dtype:
                module[name] = module[name].astype(activation_dtype(module[name].dtype))


def refuse_foreign_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedModel for weights that another library packed and nobody has rewritten."""
    settings = foreign.settings_of(config, source)
    if settings is None:
        return
    layout = f" (format {settings['format']!r})" if settings.get("format") else ""
    raise UnsupportedModel(
        source,
        [
            f"quantization_config.quant_method is {settings.get('quant_method')!r}{layout}, "
            "supported are MLX's own layouts: convert the unquantized model with `husky convert -q`"
        ],
    )


def _smaller(weights: Mapping[str, mx.array]) -> str:
    """What would fit better, for weights that are still in 16 or 32 bit."""
    if any(name.endswith(".scales") for name in weights):
        return "A smaller model or fewer bits would fit."
    parameters = sum(value.size for value in weights.values())
    return f"At 4 bit it would take about {megabytes(parameters * 9 // 16)}."


def _check_limits(max_context: int | None, max_kv_size: int | None) -> None:
    if max_context is not None:
        check_size("max_context", max_context, least=1)
    if max_kv_size is not None:
        check_size("max_kv_size", max_kv_size, least=SINK_TOKENS + 1)


def _choice(name: str, value: str) -> str:
    if value not in BACKENDS:
        raise UsageError(f"{name} must be one of {BACKENDS}, found {value!r}")
    return value
