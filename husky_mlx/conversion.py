"""``husky convert``: any checkpoint that husky reads as a checked folder that mlx-lm reads too."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_config

from husky_mlx import checkpoint, gguf_tokenizer, recipe, sources, switches
from husky_mlx.artifact import MODEL, write_manifest
from husky_mlx.errors import UnsupportedModel, UsageError
from husky_mlx.notices import notice
from husky_mlx.progress import bytes_bar
from husky_mlx.recipe import QuantSpec, Tensor, fitting
from husky_mlx.requantize import Change, losses, requantize, tensors_of
from husky_mlx.safetensors_writer import write_shards
from husky_mlx.staging import check_output, require_disk, whole_folder
from husky_mlx.stream import Stream, open_stream
from husky_mlx.structure import AFFINE_BITS, AFFINE_GROUP_SIZES, MX_FORMATS
from husky_mlx.switches import BACKENDS

DTYPES = ("float16", "bfloat16", "float32")
MODES = ("affine", *dict.fromkeys(MX_FORMATS.values()))
DEFAULT_OUTPUT = "mlx_model"  # mlx-lm's
# What mlx-lm fetches besides weights, all of which a tokenizer may need.
_TOKENIZER_PATTERNS = ("*.json", "*.py", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
_NOT_COPIED = ("config.json", "husky.json", "quantize_config.json", "hf_quant_config.json")


@dataclass(frozen=True)
class Quantization:
    """What ``-q`` and its options ask for; ``recipe`` is one of mlx-lm's mixed ones."""

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"
    recipe: str | None = None

    @classmethod
    def of(
        cls,
        bits: int | None = None,
        group_size: int | None = None,
        mode: str = "affine",
        recipe_name: str | None = None,
    ) -> Quantization:
        """mlx-lm's defaults for what is None. UsageError with the values that there are."""
        if mode not in MODES:
            raise UsageError(f"the mode must be one of {', '.join(MODES)}, found {mode!r}")
        if mode == "affine":
            bits, group_size = 4 if bits is None else bits, 64 if group_size is None else group_size
            if bits not in AFFINE_BITS:
                raise UsageError(f"the bits must be one of {AFFINE_BITS}, found {bits}")
            if group_size not in AFFINE_GROUP_SIZES:
                raise UsageError(
                    f"the group size must be one of {AFFINE_GROUP_SIZES}, found {group_size}"
                )
            return cls(bits, group_size, mode, recipe_name)
        if recipe_name is not None:
            raise UsageError(f"recipes quantize in mode affine, found {mode!r}")
        (own_bits, own_group) = next(key for key, name in MX_FORMATS.items() if name == mode)
        for word, given, own in (("bits", bits, own_bits), ("group size", group_size, own_group)):
            if given not in (None, own):
                raise UsageError(f"the {word} of {mode} must be {own}, found {given}")
        return cls(own_bits, own_group, mode)

    def allocate(self, tensors: list[Tensor]) -> dict[str, QuantSpec | None]:
        """A spec for each matrix: smaller groups where these do not divide a row, and floats where
        none do. ValueError where a matrix would get more bits than it has."""
        if self.recipe is not None:
            return recipe.resolve(self.recipe, tensors, group_size=self.group_size)
        allocation = {tensor.path: self._spec(tensor.shape[1]) for tensor in tensors}
        for tensor in tensors:
            if recipe.raises(tensor, allocation[tensor.path]):
                assert tensor.spec is not None
                raise ValueError(
                    f"{tensor.path} has {tensor.spec.bits} bit already and {self.bits} bit hold "
                    "nothing more: convert the unquantized model, or leave out -q"
                )
        return allocation

    def _spec(self, columns: int) -> QuantSpec | None:
        if self.mode == "affine":
            return fitting(self.bits, columns, self.group_size)
        fits = columns % self.group_size == 0
        return QuantSpec(self.bits, self.group_size, self.mode) if fits else None


def convert(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    quantization: Quantization | None = None,
    dequantize: bool = False,
    notify: Callable[[str], None] = notice,
) -> Path:
    """Write a checkpoint as a folder of safetensors with ``husky.json``; returns its path.

    ``source``: a Hugging Face repo, a folder, a .gguf file or an alias. ``dtype`` of floats and
    scales ("float16", "bfloat16", "float32"): that of the config's ``dtype`` unless given, else of
    its ``torch_dtype``, else the source's. A matrix stays as the source has it unless
    ``quantization`` or ``dequantize`` says otherwise. The folder appears whole or not at all.

    Raises OutputError before anything is read where it cannot be written, and what ``load`` does.
    """
    target = Path(output).expanduser()
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    if quantization is not None and dequantize:
        raise UsageError("choose either quantize or dequantize, not both")
    check_output(target, overwrite)
    path = sources.resolve(str(source), revision, notify=notify)
    stream = open_stream(path)
    for note in stream.notes:
        notify(f"{path}: {note}")
    chosen = _dtype(dtype, stream.config, notify)
    tensors = tensors_of(stream)
    allocation: dict[str, QuantSpec | None] = {tensor.path: tensor.spec for tensor in tensors}
    if quantization is not None:
        allocation = quantization.allocate(tensors)
        _say_groups(tensors, allocation, quantization, notify)
    if dequantize:
        if not any(allocation.values()):
            notify(f"{path} is not quantized: there is nothing to dequantize")
        allocation = dict.fromkeys(allocation)
    changes: list[Change] = []
    stream = requantize(stream, allocation, chosen, report=changes.append)
    require_disk(target, stream.nbytes)
    with whole_folder(target, overwrite=overwrite) as folder:
        write_model(stream, folder, f"{target.name} ({len(tensors)} matrices)")
        write_tokenizer(path, folder)
        write_manifest(folder, MODEL, {"source": source_name(str(source), path, revision)})
    if (lost := losses(changes)) is not None:
        notify(lost)
    return target


def write_model(stream: Stream, folder: Path, words: str) -> None:
    """The weights in mlx-lm's files, with their index and config.json."""
    total = stream.nbytes
    with bytes_bar(words, total) as advance:

        def take(name: str) -> mx.array:
            value = stream.take(name)
            advance(value.nbytes)
            return value

        files = write_shards(folder, stream.outline, take)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / checkpoint.INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    save_config(dict(stream.config), folder / "config.json")


def write_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer files of a folder as they are, or those that a .gguf file amounts to."""
    if source.is_file():
        gguf_tokenizer.load_tokenizer(source).save_pretrained(folder)
        return
    found = {file for pattern in _TOKENIZER_PATTERNS for file in source.glob(pattern)}
    for file in sorted(found):
        skipped = file.name in _NOT_COPIED or file.name.endswith(".index.json")
        if file.is_file() and not skipped:
            shutil.copyfile(file, folder / file.name)


def source_name(given: str, path: Path, revision: str | None) -> dict[str, Any]:
    """How ``husky.json`` calls a source: its repo and revision, or the name of a folder or file."""
    if Path(given).expanduser().exists() or sources.alias(given):
        return {"name": path.absolute().name}
    return {"name": given, "revision": revision or "main"}


def _dtype(
    asked: str | None, config: dict[str, Any], notify: Callable[[str], None]
) -> mx.Dtype | None:
    named = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) in DTYPES}
    if asked is None and len(set(named.values())) > 1:
        notify(
            f"config.json says dtype {named['dtype']} and torch_dtype {named['torch_dtype']}: "
            f"taking {named['dtype']} (--dtype chooses)"
        )
    name = asked or next(iter(named.values()), None)
    return None if name is None else getattr(mx, name)


def _say_groups(
    tensors: list[Tensor],
    allocation: dict[str, QuantSpec | None],
    asked: Quantization,
    notify: Callable[[str], None],
) -> None:
    """One line for each other storage that the widths of matrices have forced."""
    others: dict[str, list[str]] = {}
    for tensor in tensors:
        spec = allocation[tensor.path]
        if spec is None:
            others.setdefault("in floats", []).append(tensor.path)
        elif spec.group_size != asked.group_size:
            others.setdefault(f"in groups of {spec.group_size}", []).append(tensor.path)
    for words, paths in others.items():
        more = f" and {len(paths) - 1} more" if paths[1:] else ""
        notify(
            f"{paths[0]}{more} stored {words}: groups of {asked.group_size} do not divide the rows"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky convert``: mlx-lm's, and ours."""
    parser.add_argument(
        "--model",
        "--hf-path",
        metavar="MODEL",
        help="a Hugging Face repo, a folder, a .gguf file or an alias",
    )
    parser.add_argument(
        "--output",
        "--mlx-path",
        default=DEFAULT_OUTPUT,
        metavar="FOLDER",
        help=f"the new folder, for instance model.hky (default: {DEFAULT_OUTPUT})",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of floats and scales (default: what config.json says)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face repo")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder that husky wrote before"
    )
    parser.add_argument(
        "-q", "--quantize", action="store_true", help="quantize (husky compile has more recipes)"
    )
    parser.add_argument("--q-bits", type=int, help=f"one of {AFFINE_BITS} (default: 4)")
    parser.add_argument(
        "--q-group-size", type=int, help=f"one of {AFFINE_GROUP_SIZES} (default: 64)"
    )
    parser.add_argument("--q-mode", default="affine", choices=MODES)
    parser.add_argument(
        "--quant-predicate", choices=recipe.MLX_LM_RECIPES, help="mlx-lm's mixed recipes, with -q"
    )
    parser.add_argument(
        "-d", "--dequantize", action="store_true", help="write a quantized model in floats"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="for models of other families, which mlx-lm converts",
    )
    parser.add_argument(
        "--upload-repo", metavar="REPO", help="mlx-lm converts and uploads the result"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="mlx: mlx-lm's own converter (default: $HUSKY_BACKEND, else husky)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert; what husky does not support goes to mlx-lm's own converter, with one notice."""
    if args.model is None:
        raise UsageError("no --model given, and this command has no default")
    backend = args.backend or switches.BACKEND.read() or "husky"
    if args.upload_repo is not None or backend == "mlx":
        return _by_mlx_lm(args, backend)
    quantization = None
    if args.quantize:
        quantization = Quantization.of(
            args.q_bits, args.q_group_size, args.q_mode, args.quant_predicate
        )
    try:
        target = convert(
            args.model,
            args.output,
            dtype=args.dtype,
            revision=args.revision,
            overwrite=args.overwrite,
            quantization=quantization,
            dequantize=args.dequantize,
        )
    except UnsupportedModel as error:
        if not error.may_run_elsewhere or args.overwrite:
            raise
        notice(f"mlx-lm converts this one: {'; '.join(error.differences)}")
        return _by_mlx_lm(args, backend)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{target}: {size / 1e6:,.1f} MB, checked by husky.json, read by mlx-lm too")
    return 0


def _by_mlx_lm(args: argparse.Namespace, backend: str) -> int:
    from husky_mlx.dropin import DropIn

    # Not `from mlx_lm import convert`, which DropIn could not change inside.
    stock = importlib.import_module("mlx_lm.convert")
    with DropIn(backend):
        stock.convert(
            hf_path=args.model,
            mlx_path=args.output,
            quantize=args.quantize,
            q_group_size=args.q_group_size,
            q_bits=args.q_bits,
            q_mode=args.q_mode,
            dtype=args.dtype,
            upload_repo=args.upload_repo,
            revision=args.revision,
            dequantize=args.dequantize,
            quant_predicate=args.quant_predicate,
            trust_remote_code=args.trust_remote_code,
        )
    return 0
