"""An mlx-lm that is not the one we build on: stock mlx-lm runs, and one notice says why."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import warnings
from pathlib import Path

import mlx_lm
import pytest
from fixtures import FIX_B, write_folder
from mlx_lm.models import cache, llama

import husky_mlx
from husky_mlx import contract

# mlx_lm.generate and mlx_lm.utils.load are functions of the package too: these are the modules.
GENERATE = importlib.import_module("mlx_lm.generate")
UTILS = importlib.import_module("mlx_lm.utils")


@pytest.fixture(autouse=True)
def fresh():
    """The check and its notice happen once a process: start and leave without one."""
    for cached in (contract.violations, contract._give_notice):
        cached.cache_clear()
    yield
    for cached in (contract.violations, contract._give_notice):
        cached.cache_clear()


def renamed_parameter(patch):
    def load(path, tokenizer_config=None, model_config=None, adapter_path=None, lazy=False):
        raise AssertionError("not called")

    patch.setattr(UTILS, "load", load)


def function_gone(patch):
    patch.delattr(UTILS, "infer_quant_config")


def cache_member_gone(patch):
    patch.delattr(cache.KVCache, "keys_and_values")


def cache_class_gone(patch):
    patch.delattr(cache, "BatchKVCache")


def cache_attribute_renamed(patch):
    def __init__(self, max_size, keep=0):
        self.keys = self.values = None
        self.offset = self.next_slot = 0
        self.max_size, self.keep = max_size, keep

    patch.setattr(cache.RotatingKVCache, "__init__", __init__)


def cache_arguments_changed(patch):
    patch.setattr(cache.BatchKVCache, "__init__", lambda self: None)


def response_field_gone(patch):
    class GenerationResponse:
        def __init__(self, text, token, logprobs, from_draft, prompt_tokens, prompt_tps):
            raise AssertionError("not called")

    patch.setattr(GENERATE, "GenerationResponse", GenerationResponse)


def response_gone(patch):
    patch.delattr(GENERATE, "GenerationResponse")


def name_gone(patch):
    patch.delattr("mlx_lm.sample_utils.greedy_sampler")


def module_gone(patch):
    patch.setitem(sys.modules, "mlx_lm.models.activations", None)


CHANGES = [
    (renamed_parameter, "mlx_lm.utils.load takes ('path', 'tokenizer_config'"),
    (function_gone, "mlx_lm.utils.infer_quant_config is gone"),
    (cache_member_gone, "mlx_lm.models.cache.KVCache has no keys_and_values"),
    (cache_class_gone, "mlx_lm.models.cache.BatchKVCache has no update_and_fetch, prepare"),
    (cache_attribute_renamed, "mlx_lm.models.cache.RotatingKVCache has no _idx"),
    (cache_arguments_changed, "mlx_lm.models.cache.BatchKVCache has no left_padding, offset, _idx"),
    (response_field_gone, "GenerationResponse has no generation_tokens, generation_tps"),
    (response_gone, "mlx_lm.generate.GenerationResponse is gone"),
    (name_gone, "mlx_lm.sample_utils.greedy_sampler is gone"),
    (module_gone, "mlx_lm.models.activations.swiglu is gone"),
]


def test_installed_mlx_lm_keeps_the_contract():
    assert contract.violations() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("load", "generate", "stream_generate"):
            assert getattr(husky_mlx, name).__module__.startswith("husky_mlx.")


@pytest.mark.parametrize("change, difference", CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_changed_mlx_lm_means_stock_and_one_notice(monkeypatch, change, difference):
    change(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from husky_mlx import generate, load, stream_generate
    assert load.__wrapped__ is mlx_lm.load
    assert generate is mlx_lm.generate
    assert stream_generate is mlx_lm.stream_generate
    (notice,) = caught
    assert notice.category is RuntimeWarning
    assert difference in str(notice.message)
    assert mlx_lm.__version__ in str(notice.message)
    assert notice.filename == __file__, "points at the import"


def test_stock_load_takes_our_keywords(monkeypatch, tmp_path):
    folder = write_folder(tmp_path / "m", FIX_B, tokenizer=True)
    monkeypatch.delattr(GENERATE, "wired_limit")
    with pytest.warns(RuntimeWarning, match=r"mlx_lm\.generate\.wired_limit is gone"):
        load = husky_mlx.load
    ours = {"backend": "husky", "max_context": 64, "fallback": "mlx", "verbose": True}
    model, tokenizer, config = load(str(folder), return_config=True, max_kv_size=8, **ours)
    assert type(model) is llama.Model
    assert config["vocab_size"] == 264
    assert tokenizer.encode("the") == [257]


def test_every_name_that_we_import_is_in_the_contract():
    checked = {(module, name) for module, names in contract._NAMES for name in names}
    checked |= {(module, name) for module, name, _ in contract._FUNCTIONS}
    checked |= {("mlx_lm.models.cache", name) for name, *_ in contract._CACHES}
    used = set()
    for file in Path(husky_mlx.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm."):
                used |= {(node.module, alias.name) for alias in node.names}
    modules = {("mlx_lm.models", "cache"), ("mlx_lm.models", "llama")}
    assert len(used) > 10
    assert used - modules <= checked


def test_our_keywords_are_all_known_to_the_stock_load():
    from husky_mlx.loading import load

    extra = [
        p.name
        for p in inspect.signature(load).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert sorted(extra) == sorted(contract._OUR_KEYWORDS)
