"""``husky models``: what is supported, and how one model would run before its weights are here."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from husky_mlx import checkpoint, foreign, gguf, gguf_tokenizer, sources
from husky_mlx.config import LAYER_TYPES, SUPPORTED_MODEL_TYPES, LlamaConfig
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.frozen import eager_reason
from husky_mlx.gguf_config import ARCHITECTURES
from husky_mlx.gguf_file import BLOCK_TYPES
from husky_mlx.rope import SUPPORTED_ROPE_TYPES

FAST, REFERENCE, REFUSED = "fast", "reference", "refused"


@dataclass
class Verdict:
    """How a model would run here: ``verdict`` is fast, reference or refused, ``reasons`` say why
    it is not fast, and ``facts`` are what its config says. ``may_run_on_mlx_lm``: refused for what
    it is, not for damage."""

    model: str
    path: str
    verdict: str = FAST
    reasons: list[str] = field(default_factory=list)
    may_run_on_mlx_lm: bool = False
    facts: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``husky models``."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face repo, a folder, a .gguf file or an alias; without one, the support "
        "list is printed",
    )
    parser.add_argument("--json", action="store_true", help="only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the support list, or the verdict on one model; 1 for a refused one.

    Raises SourceError where the model cannot be found.
    """
    if args.model is None:
        rows = support_list()
        print(json.dumps(rows, indent=2) if args.json else table(rows))
        return 0
    verdict = check(args.model)
    if args.json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        print_verdict(verdict)
    return 1 if verdict.verdict == REFUSED else 0


def print_verdict(verdict: Verdict) -> None:
    """Print a verdict for people: the word, its reasons, the facts."""
    print(f"{verdict.model}: {verdict.verdict}")
    for reason in verdict.reasons:
        print(f"  - {reason}")
    print(table({"path": verdict.path, **verdict.facts}))
    if verdict.may_run_on_mlx_lm:
        print('It may run on mlx-lm\'s own model class: fallback="mlx" in load, or --backend mlx')


def support_list() -> dict[str, list[str]]:
    """What this version takes, by subject, from the tables that decide it."""
    return {
        "families": [
            "Llama 2, 3, 3.1, 3.2, 3.3",
            "Mistral",
            "Qwen2, Qwen2.5, Qwen3",
            "others of the same model types",
        ],
        "model types": list(SUPPORTED_MODEL_TYPES),
        "attention": list(LAYER_TYPES),
        "rope types": list(SUPPORTED_ROPE_TYPES),
        "formats": [
            "folder or Hugging Face repo of safetensors",
            f".gguf of architecture {', '.join(ARCHITECTURES)}",
        ],
        "quantization": [
            "none",
            "MLX's own layouts: any bits and group size, mixed too",
            "GPTQ without desc_act",
            "AWQ of 4 bit",
            "compressed-tensors (pack-quantized, float-quantized)",
            "fp8",
        ],
        "gguf tensor types": [name for name, _, _ in BLOCK_TYPES.values()],
        "gguf tokenizers": ["SentencePiece", *sorted(gguf_tokenizer.WORD_RULES)],
        "aliases": sorted(sources.ALIASES),
    }


def check(name: str) -> Verdict:
    """Read the config of a model (for a ``.gguf`` its header) and say how it would run here.

    Raises SourceError where the model cannot be found.
    """
    verdict, _, config = examine(name)
    if config is not None and (reason := eager_reason()):
        verdict.verdict, verdict.reasons = REFERENCE, [f"decode runs eagerly: {reason}"]
    return verdict


def examine(name: str) -> tuple[Verdict, dict[str, Any], LlamaConfig | None]:
    """The verdict on a model whatever machine it runs on, its config.json, and what we make of
    that: None where it is refused. Raises SourceError where the model cannot be found."""
    path = sources.resolve(name, config_only=True)
    verdict = Verdict(model=name, path=str(path))
    config: dict[str, Any] = {}
    try:
        config = gguf.read_config(path) if path.is_file() else checkpoint.read_config(path)
        verdict.facts = _facts(config, path)
        checked = LlamaConfig.from_dict(config, source=str(path))
        if (settings := foreign.settings_of(config, str(path))) is not None:
            foreign.check_layout(settings, str(path))
        if path.is_file():
            gguf_tokenizer.load_tokenizer(path)
    except UnsupportedModel as error:
        verdict.verdict, verdict.reasons = REFUSED, error.differences
        verdict.may_run_on_mlx_lm = error.may_run_elsewhere
    except CheckpointError as error:
        verdict.verdict, verdict.reasons = REFUSED, [str(error)]
    else:
        return verdict, config, checked
    return verdict, config, None


def _facts(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The lines of a report that a config can fill, whatever its model type."""
    names = {
        "model type": "model_type",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "key/value heads": "num_key_value_heads",
        "vocabulary": "vocab_size",
        "trained context": "max_position_embeddings",
    }
    facts = {label: str(config[key]) for label, key in names.items() if config.get(key) is not None}
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if scaling:
        facts["rope"] = ", ".join(f"{key} {value}" for key, value in dict(scaling).items())
    facts["quantization"] = _quantization(config)
    if size := _index_size(path):
        facts["weights"] = size
    return facts


def _quantization(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return "none"
    own = Counter(
        _layout(value)
        for name, value in quantization.items()
        if isinstance(value, Mapping) or (value is False and (name == "lm_head" or "." in name))
    )
    exceptions = [f"{layout} in {_count(number, 'module')}" for layout, number in own.items()]
    return ", ".join([_layout(quantization), *exceptions])


def _layout(settings: Mapping[str, Any] | bool) -> str:
    """``4 bit in groups of 64``, after the name of a layout that is not MLX's usual one."""
    if not isinstance(settings, Mapping):
        return "not quantized"
    kind = settings.get("quant_method") or settings.get("mode")
    words = [str(kind)] if kind not in (None, "affine") else []
    if "bits" in settings:
        words.append(f"{settings['bits']} bit")
    if "group_size" in settings:
        words.append(f"in groups of {settings['group_size']}")
    return " ".join(words) or "of an unknown layout"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _index_size(path: Path) -> str | None:
    """The size of the weights as the index gives it, in units of 10^6 bytes."""
    if path.is_file():
        return f"{path.stat().st_size / 1e6:,.0f} MB in 1 file"
    try:
        index = json.loads((path / checkpoint.INDEX).read_text(encoding="utf-8"))
        files = len(set(index["weight_map"].values()))
        return f"{index['metadata']['total_size'] / 1e6:,.0f} MB in {_count(files, 'file')}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def table(rows: Mapping[str, str | list[str]]) -> str:
    """Labels and values, a line each."""

    def text(value: str | list[str]) -> str:
        return value if isinstance(value, str) else ", ".join(value)

    return "\n".join(f"  {label:<18}{text(value)}" for label, value in rows.items())
