"""The part of ``husky doctor`` about models: their files, their size, which way is fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from husky_mlx import bench_run, checkpoint, choices, gguf, integrity, sources, switches
from husky_mlx.choices import HUSKY, REFERENCE, STOCK, Choice
from husky_mlx.config import LlamaConfig
from husky_mlx.doctor_report import FAIL, Finding, fail, ok, warn
from husky_mlx.errors import SourceError, UnsupportedModel
from husky_mlx.footprint import footprint
from husky_mlx.memory import megabytes, memory_limit
from husky_mlx.notices import notice
from husky_mlx.roofline import largest_context, needed

# The engines of husky bench that stand for the three ways.
ENGINES = {"husky": HUSKY, "husky-eager": REFERENCE, "mlx-lm": STOCK}
PROMPT_TOKENS, GENERATION_TOKENS, ROUNDS = 16, 64, 2
# What another way must gain over our default to be chosen: less is within a machine's noise.
MARGIN = 1.05


def cached_models() -> Iterator[Finding]:
    """The models that this package fetched itself."""
    for name, model in sources.ALIASES.items():
        path = model.cached()
        if path is not None:
            yield _files(name, path)


def model_checks(name: str) -> Iterator[Finding]:
    """The files of one model, fetched first if need be; whether it fits; which way is fastest.

    Ends at the first fail: nothing after it could be right.
    """
    try:
        path = sources.resolve(name, notify=notice)
    except SourceError as error:
        yield fail("model files", str(error), "give a folder, a .gguf file, an alias or a repo")
        return
    for check in (_files, _fits, _fastest):
        finding = check(name, path)
        yield finding
        if finding.state == FAIL:
            return


def decode_speeds(name: str) -> dict[str, float]:
    """Tokens a second of decode for each way, the median of the rounds."""
    found = bench_run.decode_speeds(list(ENGINES), name, PROMPT_TOKENS, GENERATION_TOKENS, ROUNDS)
    return {way: found[engine] for engine, way in ENGINES.items()}


def choose(decode_tps: Mapping[str, float]) -> Choice:
    """The fastest way; ours unless another is faster by more than noise."""
    best = max(decode_tps, key=lambda way: decode_tps[way])
    way = best if decode_tps[best] > MARGIN * decode_tps[HUSKY] else HUSKY
    return Choice(way, dict(decode_tps))


def _files(name: str, path: Path) -> Finding:
    try:
        wrong = integrity.problems(path)
    except UnsupportedModel as error:
        return fail("model files", str(error), "husky models lists what runs")
    if wrong:
        return fail("model files", f"{name}: {'; '.join(wrong)}", "fetch or convert it again")
    return ok("model files", f"{name}: {path} is whole")


def _fits(name: str, path: Path) -> Finding:
    """Weights, cache and activations against what MLX may use, as ``husky plan`` counts them."""
    raw = _config(path)
    size, limit = footprint(LlamaConfig.from_dict(raw, str(path)), raw), memory_limit()
    tokens, most = size.usual_context(), largest_context(size, limit)
    found = (
        f"{name}: {megabytes(needed(size, tokens))} with {tokens:,} tokens, "
        f"{megabytes(size.weight_bytes())} of it weights; MLX may use {megabytes(limit)}"
    )
    advice = "take fewer bits or a smaller model, as husky plan says"
    if most == 0:
        return fail("model memory", found, advice)
    if most is not None and most < tokens:
        return warn("model memory", f"{found}: {most:,} tokens fit", advice)
    return ok("model memory", found)


def _config(path: Path) -> dict[str, Any]:
    return gguf.read_config(path) if path.is_file() else checkpoint.read_config(path)


def _fastest(name: str, path: Path) -> Finding:
    """Time the three ways and keep the winner, which ``load`` takes from then on.

    What was timed under switches that change what runs is only said.
    """
    config, choice = _config(path), choose(decode_speeds(name))
    if changed := switches.changed():
        return ok("fastest", f"{choice}; not kept, because {', '.join(changed)} changes what runs")
    choices.remember(config, choice)
    return ok("fastest", f"{choice}; kept in {choices.path()}, HUSKY_CHOICE=0 ignores it")
