"""``husky doctor`` on a model: damage to its files, and one that does not fit."""

from __future__ import annotations

from dataclasses import replace

from doctor_findings import one
from fixtures import write_folder

from husky_mlx import demo_model, doctor_model, integrity
from husky_mlx.config import LlamaConfig
from husky_mlx.doctor_report import FAIL, OK, WARN
from husky_mlx.footprint import footprint
from husky_mlx.roofline import needed


def test_a_truncated_file_and_another_shape_are_found(tmp_path):
    whole = write_folder(tmp_path / "a model")
    assert integrity.problems(whole) == []
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = one(lambda: doctor_model.model_checks(str(whole)), FAIL)
    assert "truncated or not a safetensors file" in found.found
    other = write_folder(tmp_path / "other", hidden_size=128)
    assert "do not fit the config" in integrity.problems(other)[0]


def test_a_flipped_byte_in_the_hubs_cache_is_found(tmp_path):
    """There a file is a link to one that is named by its hash."""
    folder = write_folder(tmp_path / "snapshot")
    file = folder / "model.safetensors"
    blob = tmp_path / integrity.sha256(file)
    file.rename(blob)
    file.symlink_to(blob)
    assert integrity.problems(folder) == []
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    (found,) = integrity.problems(folder)
    assert f"expected {blob.name}" in found


def test_a_flipped_byte_in_the_model_of_the_demo_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path))
    content = b"a model"
    sha256 = "0" * 64
    model = replace(demo_model.SMOLLM2, size=len(content), sha256=sha256)
    model.cache_path.write_bytes(content)
    monkeypatch.setattr(integrity.sources, "ALIASES", {"smollm2": model})
    monkeypatch.setattr(integrity.gguf, "read_config", lambda path: {})
    found = one(doctor_model.cached_models)
    assert (found.state, f"expected {sha256}" in found.found) == (FAIL, True)


def test_a_model_that_is_not_there_or_not_ours_is_a_finding(tmp_path):
    found = one(lambda: doctor_model.model_checks("./none"))
    assert (found.state, "no such file" in found.found) == (FAIL, True)
    other = write_folder(tmp_path, model_type="gemma")
    found = one(lambda: doctor_model.model_checks(str(other)))
    assert (found.state, "model_type is 'gemma'" in found.found) == (FAIL, True)


def test_a_model_that_does_not_fit_is_found(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model")
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: 1000)
    assert "husky plan" in one(lambda: doctor_model.model_checks(str(folder)), FAIL).advice
    # The weights alone would fit, what a reply needs beside them does not.
    raw = doctor_model.checkpoint.read_config(folder)
    size = footprint(LlamaConfig.from_dict(raw), raw)
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: needed(size, 300))
    found = doctor_model._fits("model", folder)
    assert (found.state, "tokens fit" in found.found) == (WARN, True)
    monkeypatch.setattr(doctor_model, "memory_limit", lambda: needed(size, 512))
    assert doctor_model._fits("model", folder).state == OK
