"""``husky models``: the verdict on a model from its config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixtures import FIX_A, FIX_B, write_folder
from gguf_files import write

from husky_mlx import cli, sources, support
from husky_mlx.config import SUPPORTED_MODEL_TYPES
from husky_mlx.rope import SUPPORTED_ROPE_TYPES


def config_only(folder: Path, **changes) -> str:
    """A folder that has a config.json and no weights at all."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**FIX_A, **changes}))
    return str(folder)


def ask(capsys, *words: str) -> tuple[int, dict]:
    code = cli.main(["models", *words, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def test_fast_without_any_weights(tmp_path, capsys):
    code, answer = ask(capsys, config_only(tmp_path))
    assert (code, answer["verdict"], answer["reasons"]) == (0, "fast", [])
    assert answer["facts"]["layers"] == "2"
    assert answer["facts"]["quantization"] == "none"


def test_reference_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HUSKY_EAGER", "1")
    code, answer = ask(capsys, config_only(tmp_path))
    assert (code, answer["verdict"]) == (0, "reference")
    assert answer["reasons"] == ["decode runs eagerly: HUSKY_EAGER is set"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_type": "gemma"}, ["model_type", "gemma"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type", "dynamic"]),
        ({"num_attention_heads": 3, "head_dim": 16}, ["num_attention_heads 3"]),
        ({"quantization_config": {"quant_method": "aqlm"}}, ["quant_method", "aqlm"]),
        ({"hidden_size": None}, ["hidden_size"]),
    ],
)
def test_refused_names_the_field(tmp_path, capsys, changes, fields):
    code, answer = ask(capsys, config_only(tmp_path, **changes))
    assert (code, answer["verdict"]) == (1, "refused")
    (reason,) = answer["reasons"]
    assert all(field in reason for field in fields)


def test_two_differences_are_two_reasons(tmp_path, capsys):
    config = config_only(tmp_path, hidden_act="gelu", final_logit_softcapping=30.0)
    _, answer = ask(capsys, config)
    assert len(answer["reasons"]) == 2


def test_folder_without_config(tmp_path, capsys):
    code, answer = ask(capsys, str(tmp_path))
    assert (code, answer["verdict"]) == (1, "refused")
    assert "config.json" in answer["reasons"][0]


def test_quantization_and_index_are_reported(tmp_path, capsys):
    quantization = {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}
    name = config_only(tmp_path, quantization=quantization)
    index = {
        "metadata": {"total_size": 4_100_000_000},
        "weight_map": {"a": "1", "b": "2", "c": "2"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, answer = ask(capsys, name)
    assert (
        answer["facts"]["quantization"]
        == "4 bit in groups of 64, 8 bit in groups of 64 in 1 module"
    )
    assert answer["facts"]["weights"] == "4,100 MB in 2 files"


def test_text_form(tmp_path, capsys):
    name = config_only(tmp_path, model_type="gemma")
    assert cli.main(["models", name]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{name}: refused"
    assert lines[1].startswith("  - model_type is 'gemma'")
    assert lines[-1].endswith('fallback="mlx" in load, or --backend mlx')


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mxfp4 4 bit in groups of 32"),
        (
            {
                "group_size": 64,
                "bits": 4,
                "model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 6},
                "model.layers.1.mlp.up_proj": {"group_size": 64, "bits": 6},
                "model.embed_tokens": False,
                "lm_head": False,
            },
            "4 bit in groups of 64, 6 bit in groups of 64 in 2 modules, not quantized in 2 modules",
        ),
    ],
)
def test_quantization_in_words(tmp_path, capsys, quantization, words):
    _, answer = ask(capsys, config_only(tmp_path, quantization=quantization))
    assert answer["facts"]["quantization"] == words


@pytest.mark.parametrize("config", [None, "", "{", "{}", '{"model_type": "llama"}'])
def test_a_damaged_folder_is_not_sent_to_mlx_lm(tmp_path, capsys, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert cli.main(["models", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "refused" in captured.out
    assert "mlx-lm" not in captured.out + captured.err


def test_a_damaged_or_foreign_gguf_is_not_sent_to_mlx_lm(tmp_path, capsys):
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF\x03")
    write(tmp_path / "other.gguf", {}, architecture="qwen2")
    for name in ("damaged", "other"):
        assert cli.main(["models", str(tmp_path / f"{name}.gguf")]) == 1
        assert "mlx-lm" not in capsys.readouterr().out


def test_nothing_but_the_config_is_asked_for(tmp_path, monkeypatch):
    asked = []

    def resolve(name, revision=None, config_only=False, **_options):
        asked.append((name, config_only))
        return write_folder(tmp_path, FIX_B)

    monkeypatch.setattr(sources, "resolve", resolve)
    assert support.check("someone/model").verdict == "fast"
    assert asked == [("someone/model", True)]


def test_unknown_name_fails(capsys):
    assert cli.main(["models", "./no/such/folder"]) == 1
    assert capsys.readouterr().err.startswith("husky: error: ")


def test_list_comes_from_the_tables(capsys):
    code, rows = ask(capsys)
    assert code == 0
    assert rows["model types"] == list(SUPPORTED_MODEL_TYPES)
    assert rows["rope types"] == list(SUPPORTED_ROPE_TYPES)
    assert {"Q4_0", "Q4_1", "Q8_0"} <= set(rows["gguf tensor types"])
    assert rows["aliases"] == ["smollm2"]
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(value in text for values in rows.values() for value in values)
