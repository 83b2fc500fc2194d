"""``husky.json``: every byte that husky wrote is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import pytest
from fixtures import FIX_B, mlx_weights, write_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from husky_mlx import artifact
from husky_mlx.compilation import compile_model
from husky_mlx.conversion import convert
from husky_mlx.errors import ArtifactError
from husky_mlx.loading import load

SMALL = {**FIX_B, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    source = write_folder(folder / "source", SMALL, mlx_weights(SMALL), tokenizer=True)
    return convert(source, folder / "m.hky", notify=pytest.fail)


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m.hky"))


def refusal(folder: Path, **options) -> str:
    with pytest.raises(ArtifactError) as error:
        load(str(folder), **options)
    return str(error.value)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_caught(whole, data):
    """In weights, header, config, tokenizer and in the manifest itself, its spaces included."""
    files = sorted(whole.iterdir())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    where = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(len(content), 99) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(content)
    changed[where] ^= 1 << bit
    try:
        path.write_bytes(changed)
        message = refusal(whole)
    finally:
        path.write_bytes(content)
    assert str(path) in message and "again" in message


@pytest.mark.parametrize("backend", ["husky", "mlx"])
@pytest.mark.parametrize("lazy", [False, True])
def test_mlx_lms_class_and_lazy_loading_are_checked_too(backend, lazy, copy):
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert "its SHA-256 is" in refusal(copy, backend=backend, lazy=lazy)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_and_a_truncated_file_are_named(name, copy):
    path = copy / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    assert f"{path}: expected {size:,} bytes, found {size - 3:,}" in refusal(copy)
    path.unlink()
    assert f"{path}: husky.json lists it and it is not there" in refusal(copy)


def test_weights_that_are_not_listed(copy):
    shutil.copy(copy / "model.safetensors", copy / "model-00002-of-00002.safetensors")
    assert "weights that husky.json does not list" in refusal(copy)
    (copy / "model-00002-of-00002.safetensors").unlink()
    (copy / "notes.txt").write_text("a user's own")
    load(str(copy))


@given(st.sampled_from([0, 2, None, "1", [1], 99]))
@example(1.5)
@settings(deadline=None, max_examples=10)
def test_another_format_says_so(whole, version):
    path = whole / artifact.MANIFEST
    content = path.read_text()
    try:
        path.write_text(content.replace('"format": 1,', f'"format": {json.dumps(version)},'))
        message = refusal(whole)
    finally:
        path.write_text(content)
    assert f"format {version!r}, this version of husky_mlx reads format 1" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, "{}"])
def test_a_manifest_that_is_none(text, copy):
    (copy / artifact.MANIFEST).write_text(text)
    assert f"{copy / artifact.MANIFEST}: damaged" in refusal(copy)


def test_a_folder_without_a_manifest_is_nobodys(tmp_path):
    assert artifact.verify(tmp_path) is None
    (tmp_path / artifact.MANIFEST).mkdir()
    with pytest.raises(ArtifactError, match="cannot be read"):
        artifact.verify(tmp_path)


def forged(folder: Path, **changes) -> None:
    """A manifest of other content, as another version could have written it: its hash is right."""
    path = folder / artifact.MANIFEST
    content = {**json.loads(path.read_text()), **changes}
    content = {k: v for k, v in content.items() if v is not ... and k != "sha256"}

    def text() -> str:
        return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"

    content["sha256"] = hashlib.sha256(text().encode()).hexdigest()
    path.write_text(text())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": ...}, "the kind is None"),
        ({"kind": []}, "the kind is []"),
        ({"files": ...}, "files"),
        ({"files": [1]}, "files"),
        ({"files": {"config.json": 3}}, "files"),
        ({"files": {"config.json": {"bytes": 3}}}, "files"),
        ({"source": "x"}, "source"),
        ({"kind": "build"}, "quant, adapter, target, layouts, tiles, versions"),
    ],
)
def test_fields_that_are_missing_or_of_another_type(changes, words, copy):
    forged(copy, **changes)
    message = refusal(copy)
    assert str(copy / artifact.MANIFEST) in message and words in message


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": {"lm_head": {}}},
        {"layouts": {"lm_head": 3}},
        {"tiles": [3]},
        {"tiles": [{"op": "x"}]},
    ],
)
def test_a_build_with_layouts_or_tiles_of_another_kind(changes, copy):
    build = compile_model(copy, "cpu", output=copy.parent / "build", notify=pytest.fail).path
    forged(build, **changes)
    assert "its layouts or tiles are not those" in refusal(build)


@pytest.mark.parametrize("field", ["target", "versions"])
def test_a_build_that_does_not_say_what_it_is_for_runs_without_its_choices(field, copy):
    build = compile_model(copy, "cpu", output=copy.parent / "build", notify=pytest.fail).path
    forged(build, **{field: {}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = load(str(build))
    assert model.layers
