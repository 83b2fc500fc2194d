"""mlx-lm's own code on our model: what changes while the drop-in is installed, and what is left."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import mlx_lm
import mlx_lm.chat
import mlx_lm.generate
import mlx_lm.models.llama
import mlx_lm.utils
import pytest
from fixtures import FIX_B
from server_fixture import write_fix_b

from husky_mlx import dropin, sources
from husky_mlx.config import SUPPORTED_MODEL_TYPES, LlamaConfig
from husky_mlx.dropin import DropIn
from husky_mlx.model import Model

GENERATE = sys.modules["mlx_lm.generate"]
STOCK = mlx_lm.models.llama.Model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_fix_b(tmp_path_factory.mktemp("dropin") / "fix-b")


@pytest.fixture(scope="module")
def unsupported(tmp_path_factory) -> Path:
    """A llama-typed model with a RoPE kind that mlx-lm computes and we refuse."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    return write_fix_b(tmp_path_factory.mktemp("dropin") / "dynamic", rope_scaling=scaling)


def snapshot() -> dict:
    names = ("load", "load_tokenizer", "stream_generate")
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "mlx_lm"}
    return {
        **{(m, n): vars(modules[m]).get(n) for m in modules for n in names},
        "remapping": dict(mlx_lm.utils.MODEL_REMAPPING),
        "registered": dropin.MODULE in sys.modules,
    }


def test_plain_import_changes_nothing():
    """This module has imported the package and the drop-in already."""
    assert dropin.MODULE not in sys.modules
    assert mlx_lm.load.__module__ == "mlx_lm.utils"
    assert mlx_lm.utils.MODEL_REMAPPING["mistral"] == "llama"


def test_everything_is_put_back():
    sys.modules.pop("mlx_lm.cache_prompt", None)
    before = snapshot()
    stock = (mlx_lm.load, mlx_lm.stream_generate, mlx_lm.utils.load_tokenizer)
    with DropIn():
        inside = snapshot()
        assert inside["registered"]
        bound = [key for key, value in before.items() if value in stock]
        assert ("mlx_lm.generate", "load") in bound
        assert all(inside[key] not in stock for key in bound)
        assert inside["mlx_lm.tokenizer_utils", "load"] is before["mlx_lm.tokenizer_utils", "load"]
        late = importlib.import_module("mlx_lm.cache_prompt")
        assert late.load is mlx_lm.utils.load
    after = snapshot()
    assert {key: after[key] for key in before} == before
    assert late.load is mlx_lm.utils.load is stock[0]


def test_put_back_after_an_error():
    before = snapshot()
    with pytest.raises(ZeroDivisionError), DropIn():
        raise ZeroDivisionError
    assert snapshot() == before


def test_two_at_once_are_refused():
    with DropIn(), pytest.raises(RuntimeError, match="already"):
        DropIn().install()


def test_each_supported_type_is_remapped_and_no_other():
    before = dict(mlx_lm.utils.MODEL_REMAPPING)
    with DropIn():
        inside = dict(mlx_lm.utils.MODEL_REMAPPING)
    for kind in SUPPORTED_MODEL_TYPES:
        assert inside.pop(kind) == "husky_llama"
        before.pop(kind, None)
    assert inside == before
    assert before["xverse"] == "llama"


class TestLoadModel:
    """``load_model`` is the door that ``sharded_load`` and others take."""

    def test_builds_ours(self, model):
        with DropIn():
            loaded, config = mlx_lm.utils.load_model(model)
        assert type(loaded) is Model
        assert isinstance(loaded.args, LlamaConfig)
        assert config["model_type"] == "llama"

    def test_mistral_too(self, tmp_path):
        with DropIn():
            loaded, _ = mlx_lm.utils.load_model(write_fix_b(tmp_path, model_type="mistral"))
        assert type(loaded) is Model

    def test_type_that_mlx_lm_maps_to_llama_stays_there(self, tmp_path, capsys):
        with DropIn():
            loaded, _ = mlx_lm.utils.load_model(write_fix_b(tmp_path, model_type="xverse"))
        assert type(loaded) is STOCK
        assert capsys.readouterr().err == ""

    def test_unsupported_gets_mlx_lm_with_one_notice(self, unsupported, capsys):
        with DropIn():
            for _ in range(2):
                loaded, _ = mlx_lm.utils.load_model(unsupported)
                assert type(loaded) is STOCK
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("husky: ")
        assert "rope_scaling.rope_type is 'dynamic'" in captured.err

    def test_tokenizer_defaults_find_the_module(self, model):
        with DropIn():
            assert mlx_lm.utils._tokenizer_defaults(model) is None
            assert mlx_lm.utils._get_classes(dict(FIX_B))[0].__module__ == dropin.MODULE


class TestLoad:
    def test_ours_with_mlx_lm_arguments(self, model):
        with DropIn(max_context=77, max_kv_size=33):
            loaded, tokenizer, config = mlx_lm.load(
                str(model),
                tokenizer_config={"trust_remote_code": False},
                model_config={"quantize_activations": False},
                return_config=True,
                lazy=True,
            )
        assert type(loaded) is Model
        assert (loaded.max_context, loaded.max_kv_size) == (77, 33)
        assert tokenizer.encode("the") == [257]
        assert config["hidden_size"] == 64

    def test_unsupported_gets_mlx_lm_with_exactly_one_notice(self, unsupported, capsys):
        with DropIn():
            loaded, _ = mlx_lm.load(str(unsupported))
        assert type(loaded) is STOCK
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1
        assert "dynamic" in lines[0]

    @pytest.mark.parametrize("way", ["argument", "environment"])
    def test_mlx_backend_is_mlx_lm(self, model, monkeypatch, capsys, way):
        if way == "environment":
            monkeypatch.setenv("HUSKY_BACKEND", "mlx")
        with DropIn(backend="mlx" if way == "argument" else None):
            loaded, _ = mlx_lm.load(str(model))
            direct, _ = mlx_lm.utils.load_model(model)
        assert type(loaded) is type(direct) is STOCK
        assert capsys.readouterr().err == ""

    def test_unknown_backend(self, model, monkeypatch):
        monkeypatch.setenv("HUSKY_BACKEND", "torch")
        with DropIn(), pytest.raises(ValueError, match=r"husky, mlx, found 'torch'"):
            mlx_lm.load(str(model))

    def test_without_a_model(self):
        with DropIn(), pytest.raises(ValueError, match="no --model given"):
            mlx_lm.load(None)

    def test_announced_once(self, model, capsys):
        with DropIn(announce=True):
            mlx_lm.load(str(model))
            mlx_lm.load(str(model))
        assert capsys.readouterr().err == f"husky: no --model given: using {model}\n"

    @pytest.mark.parametrize("backend", ["husky", "mlx"])
    def test_alias(self, model, monkeypatch, backend):
        """The alias is made to point at the tiny model: no download."""
        monkeypatch.setitem(sources.ALIASES, "smollm2", sources.ALIASES["smollm2"])
        original = sources.resolve
        monkeypatch.setattr(
            sources, "resolve", lambda name, *a, **k: original(_point(name, model), *a, **k)
        )
        with DropIn(backend=backend):
            tokenizer = mlx_lm.utils.load_tokenizer("smollm2")
        assert tokenizer.encode("the") == [257]


def _point(name, model):
    return str(model) if name == "smollm2" else name


class TestStreamGenerate:
    def test_mlx_lm_generate_takes_the_frozen_step(self, model):
        stock_model, tokenizer = mlx_lm.load(str(model))
        expected = mlx_lm.generate(stock_model, tokenizer, "hello", max_tokens=12)
        with DropIn():
            ours, tokenizer = mlx_lm.load(str(model))
            answer = mlx_lm.generate(ours, tokenizer, "hello", max_tokens=12)
        assert answer == expected != ""
        assert ours.plan.counts["frozen"] >= 11

    def test_chat_has_ours(self):
        stock = mlx_lm.chat.stream_generate
        with DropIn():
            assert mlx_lm.chat.stream_generate is GENERATE.stream_generate is not stock
        assert mlx_lm.chat.stream_generate is GENERATE.stream_generate is stock

    def test_mlx_backend_keeps_mlx_lm_loop(self, model, monkeypatch):
        def refuse(*_arguments, **_options):
            raise AssertionError("our loop was called")

        monkeypatch.setattr(dropin, "stream_generate", refuse)
        with DropIn(backend="mlx"):
            stock_model, tokenizer = mlx_lm.load(str(model))
            responses = list(mlx_lm.stream_generate(stock_model, tokenizer, "a", max_tokens=2))
        assert len(responses) == 2
