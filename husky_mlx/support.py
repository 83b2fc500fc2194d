"""``husky models``: what is supported, and how one model would run before its weights are here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from husky_mlx import checkpoint, gguf, gguf_tokenizer, sources
from husky_mlx.config import LAYER_TYPES, SUPPORTED_MODEL_TYPES, LlamaConfig
from husky_mlx.errors import CheckpointError, UnsupportedModel
from husky_mlx.frozen import eager_reason
from husky_mlx.gguf_file import BLOCK_TYPES
from husky_mlx.loading import refuse_foreign_quantization
from husky_mlx.rope import SUPPORTED_ROPE_TYPES

FAST, REFERENCE, REFUSED = "fast", "reference", "refused"


@dataclass
class Verdict:
    """How a model would run here: ``verdict`` is fast, reference or refused, ``reasons`` say why
    it is not fast, and ``facts`` are what its config says."""

    model: str
    path: str
    verdict: str = FAST
    reasons: list[str] = field(default_factory=list)
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
        print(json.dumps(rows, indent=2) if args.json else _table(rows))
        return 0
    verdict = check(args.model)
    if args.json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        print(f"{verdict.model}: {verdict.verdict}")
        print("\n".join(f"  - {reason}" for reason in verdict.reasons), end="")
        print(("\n" if verdict.reasons else "") + _table({"path": verdict.path, **verdict.facts}))
        if verdict.verdict == REFUSED:
            print("It may run on mlx-lm's own model class: --backend mlx")
    return 1 if verdict.verdict == REFUSED else 0


def support_list() -> dict[str, list[str]]:
    """What this version takes, by subject, from the tables that decide it."""
    return {
        "families": ["Llama 2, 3, 3.1, 3.2, 3.3", "Mistral", "others of the same model types"],
        "model types": list(SUPPORTED_MODEL_TYPES),
        "attention": list(LAYER_TYPES),
        "rope types": list(SUPPORTED_ROPE_TYPES),
        "formats": ["folder or Hugging Face repo of safetensors", ".gguf of architecture llama"],
        "quantization": ["none", "MLX's own layouts: any bits and group size, mixed too"],
        "gguf tensor types": [name for name, _, _ in BLOCK_TYPES.values()],
        "gguf tokenizers": ["SentencePiece", *sorted(gguf_tokenizer.WORD_RULES)],
        "aliases": sorted(sources.ALIASES),
    }


def check(name: str) -> Verdict:
    """Read the config of a model (for a ``.gguf`` its header) and say how it would run.

    Raises SourceError where the model cannot be found.
    """
    path = sources.resolve(name, config_only=True)
    verdict = Verdict(model=name, path=str(path))
    try:
        config = gguf.read_config(path) if path.is_file() else checkpoint.read_config(path)
        verdict.facts = _facts(config, path)
        LlamaConfig.from_dict(config, source=str(path))
        refuse_foreign_quantization(config, str(path))
        if path.is_file():
            gguf_tokenizer.load_tokenizer(path)
    except UnsupportedModel as error:
        verdict.verdict, verdict.reasons = REFUSED, error.differences
    except CheckpointError as error:
        verdict.verdict, verdict.reasons = REFUSED, [str(error)]
    else:
        if reason := eager_reason():
            verdict.verdict, verdict.reasons = REFERENCE, [f"decode runs eagerly: {reason}"]
    return verdict


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
    settings = {k: v for k, v in quantization.items() if not isinstance(v, Mapping)}
    text = ", ".join(f"{key} {value}" for key, value in settings.items())
    exceptions = sum(isinstance(v, Mapping) for v in quantization.values())
    own = "1 module of its own" if exceptions == 1 else f"{exceptions} modules of their own"
    return f"{text}, {own}" if exceptions else text


def _index_size(path: Path) -> str | None:
    """The size of the weights as the index gives it, in units of 10^6 bytes."""
    if path.is_file():
        return f"{path.stat().st_size / 1e6:,.0f} MB"
    try:
        index = json.loads((path / checkpoint.INDEX).read_text(encoding="utf-8"))
        files = len(set(index["weight_map"].values()))
        return f"{index['metadata']['total_size'] / 1e6:,.0f} MB in {files} files"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _table(rows: Mapping[str, str | list[str]]) -> str:
    def text(value: str | list[str]) -> str:
        return value if isinstance(value, str) else ", ".join(value)

    return "\n".join(f"  {label:<18}{text(value)}" for label, value in rows.items())
