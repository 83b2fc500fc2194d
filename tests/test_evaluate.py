"""``husky eval``: its figures against float64, and the command as a user runs it."""

from __future__ import annotations

import json
import math

import bench_fakes
import mlx.core as mx
import numpy as np
import numpy_llama
import pytest
from fixtures import FIX_B, mlx_weights, numpy_weights, quantize_weights, write_folder

from husky_mlx import cli, divergence
from husky_mlx.calibrate_text import DOMAINS
from husky_mlx.divergence import Divergence, compare
from husky_mlx.evaluate_models import Row
from husky_mlx.evaluate_report import differs, print_table

fake_engines = pytest.fixture(bench_fakes.fake_engines)

TEXT = "the inn in the thin than then, and an ant. " * 6


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 40.0, 300.0])
def test_compare_equals_float64(xp, spread):
    rng = np.random.default_rng(0)
    reference = (10 * rng.normal(size=(20, 50))).astype(np.float32)
    logits = (reference + spread * rng.normal(size=(20, 50))).astype(np.float32)
    targets = rng.integers(0, 50, 20)
    p, q = log_probabilities(reference), log_probabilities(logits)
    with np.errstate(over="raise", invalid="raise"):
        found = compare(xp.array(reference), xp.array(logits), targets, xp)
    assert found.tokens == 20
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    assert found.surprise == pytest.approx(-q[np.arange(20), targets].sum(), rel=1e-5)
    assert found.agreement == (p.argmax(-1) == q.argmax(-1)).mean()


def test_by_hand():
    """Two tokens of probability 3/4, 1/4 against 1/2, 1/2."""
    reference, logits = np.log(np.float32([[3, 1]])), np.float32([[0, 0]])
    found = compare(reference, logits, np.array([1])) + Divergence(1, 0.0, math.log(8), 1)
    assert 2 * found.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert found.perplexity == pytest.approx(math.sqrt(2 * 8))
    assert found.agreement == 1.0 and differs(found) == "none"
    assert differs(Divergence(tokens=30, agreeing=28)) == "1 token in 15.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("eval") / "a model é", FIX_B, tokenizer=True)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "my text.txt"
    file.write_text(TEXT)
    return file


def run(model, text, *options: object) -> int:
    words = ["eval", "--model", model, "--text", text, "--calibrate", text, "--length", 32]
    return cli.main([str(word) for word in (*words, *options)])


def evaluated(tmp_path, model, text, *options: object) -> dict:
    file = tmp_path / "new folder" / "found.json"
    assert run(model, text, "--json", file, *options) == 0
    found = json.loads(file.read_text())
    return found | {"rows": {f"{m['name']} {m['rounding']}".strip(): m for m in found["models"]}}


def test_figures_equal_float64(tmp_path, model, text, monkeypatch):
    monkeypatch.setattr(divergence, "_POSITIONS", 10)
    rows = evaluated(tmp_path, model, text, "--recipes", "3bit-uniform")["rows"]
    from mlx_lm.utils import load_tokenizer

    ids = load_tokenizer(model).encode(TEXT)
    pieces = [ids[i : i + 32] for i in range(0, len(ids) - 31, 32)]
    weights, rounded = numpy_weights(FIX_B), numpy_weights(FIX_B)
    for name, value in rounded.items():
        if value.ndim == 2:
            # Scales in float16, which a model in float32 is given.
            parts = mx.quantize(mx.array(value).astype(mx.float16), 64, 3)
            parts = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
            rounded[name] = np.array(mx.dequantize(*parts, 64, 3))
    kl, surprise, same = [], [], []
    for piece in pieces:
        p, q = (
            log_probabilities(numpy_llama.logits(FIX_B, w, piece)[:-1]) for w in (weights, rounded)
        )
        kl += list((np.exp(p) * (p - q)).sum(-1))
        surprise += list(-q[np.arange(31), piece[1:]])
        same += list(p.argmax(-1) == q.argmax(-1))
    found = rows["3bit-uniform rtn"]["all"]
    assert found["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(surprise)), rel=1e-4)
    assert found["agreement"] == pytest.approx(np.mean(same))
    assert rows["3bit-uniform rtn"]["domains"] == {"my text": found}
    assert rows["3bit-uniform rtn"]["bits_per_weight"] == 3.5
    matrices = sum(value.size for value in weights.values() if value.ndim == 2)
    vectors = sum(value.size for value in weights.values() if value.ndim == 1)
    assert rows["3bit-uniform rtn"]["bytes"] == matrices * 3.5 / 8 + 2 * vectors
    assert rows["unquantized"]["bytes"] == 2 * (matrices + vectors)
    assert rows["unquantized"]["all"]["kl"] == pytest.approx(0, abs=1e-9)


def test_recipes_and_roundings_side_by_side(tmp_path, model, text, capsys):
    names = ("--recipes", "keep,bf16,8bit,2bit-uniform", "--rounding", "rtn,gptq,awq")
    found = evaluated(tmp_path, model, text, *names, "--tokens", 64)
    rows = found["rows"]
    assert list(rows) == [
        "unquantized",
        "keep",
        "bf16",
        *(f"{r} {m}" for r in ("8bit", "2bit-uniform") for m in ("rtn", "gptq", "awq")),
    ]
    assert found["tokens"] == {"my text": 62} and found["command"]
    kl = {name: row["all"]["kl"] for name, row in rows.items()}
    assert kl["keep"] == pytest.approx(0, abs=1e-9)
    assert 0 < kl["bf16"] < kl["8bit rtn"] < kl["2bit-uniform rtn"]
    assert kl["2bit-uniform gptq"] < kl["2bit-uniform rtn"]
    out = capsys.readouterr().out
    for part in (
        "not how well a model does tasks",
        "husky evaluate",
        "Decode speed is measured of models on disk only",
    ):
        assert part in " ".join(out.split())


def test_auto_is_deterministic(tmp_path, model, text):
    names = ("--recipes", "3bit-uniform,auto", "--rounding", "gptq", "--tokens", 64)
    found = evaluated(tmp_path, model, text, *names, "--budget", 3.5)
    fixed, auto = found["rows"]["3bit-uniform gptq"], found["rows"]["auto gptq"]
    assert auto["bits_per_weight"] <= 3.5 and auto["bytes"] <= fixed["bytes"]
    assert auto["all"]["kl"] <= fixed["all"]["kl"]
    assert evaluated(tmp_path, model, text, *names, "--budget", 3.5)["models"] == found["models"]


def test_a_model_on_disk_is_as_the_recipe_that_made_it(tmp_path, model, text, fake_engines):
    weights = {name: value.astype(mx.float16) for name, value in mlx_weights(FIX_B).items()}
    packed = quantize_weights(weights, 4, 32)
    stored = write_folder(tmp_path / "stored", FIX_B, packed, tokenizer=True)
    fake_engines()
    recipes = ("--recipes", "4bit-uniform", "--group-size", 32, "--compare", stored)
    rows = evaluated(tmp_path, model, text, *recipes)["rows"]
    ours, theirs = rows["4bit-uniform rtn"], rows[f"{stored} stored"]
    assert theirs["all"] == pytest.approx(ours["all"], rel=1e-5)
    assert theirs["bits_per_weight"] == ours["bits_per_weight"]
    # The fake's trial n makes 10 n tokens a second; the first is the cold one, three are timed.
    assert (ours["decode_tps"], theirs["decode_tps"]) == (None, 30.0)
    assert theirs["bytes"] == sum(value.nbytes for value in packed.values())


def test_what_cannot_be_timed_is_evaluated_all_the_same(
    tmp_path, model, text, fake_engines, capsys
):
    weights = quantize_weights(mlx_weights(FIX_B), 4, 32)
    stored = write_folder(tmp_path / "stored", FIX_B, weights, tokenizer=True)
    fake_engines(husky="load")
    rows = evaluated(tmp_path, model, text, "--compare", stored)["rows"]
    assert rows[f"{stored} stored"]["decode_tps"] is None
    assert rows[f"{stored} stored"]["all"]["kl"] > 0
    assert f"{stored} was not timed: engine husky failed" in capsys.readouterr().err


def test_bundled_domains(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["eval", "--model", model, "--recipes", "8bit", "--tokens", 40, "--length", 20]
    assert cli.main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    headers = [line.split() for line in out.splitlines() if "chinese" in line]
    assert headers == [["model", *DOMAINS]] * 3, out
    assert "1 token in" in out


def test_the_default_recipes_fit_a_terminal_of_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = Divergence(tokens=300, divergence=300.0, surprise=1500.0, agreeing=290)
    print_table([Row("4bit-uniform", "rtn", 12_345_600_000, 4.5, {"general": found})])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "12,345.6" in line)
    assert line.split()[:2] == ["4bit-uniform", "rtn"] and "1 token in 30.0" in line


def test_plot(tmp_path, model, text):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new folder" / "plot"
    assert run(model, text, "--recipes", "8bit,4bit", "--plot", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, words",
    [
        (("--recipes", "auto"), "'auto' and a budget in bits per weight need each other"),
        (("--recipes", "auto", "--budget", 2), "below the smallest choice, 2.500"),
        (("--recipes", "9bit"), "expected different names out of keep"),
        (("--rounding", "rtn,rtn"), "expected different names out of rtn"),
        (("--text", "/no/such/file"), "/no/such/file"),
        (("--calibrate", "/no/such/file"), "/no/such/file"),
        (("--compare", "./no-such-model"), "no such file or folder"),
        (("--json", "/dev/null/found.json"), "/dev/null"),
        (("--recipes", "auto", "--budget", "nan"), "a number of bits per weight above 0"),
        (("--recipes", "auto", "--budget", "inf"), "a number of bits per weight above 0"),
        (("--recipes", "auto", "--budget=-1"), "a number of bits per weight above 0"),
        (("--json", "/tmp"), "--json /tmp: it is a folder"),
        (("--plot", "/tmp"), "--plot /tmp: it is a folder"),
        (("--text", "/tmp"), "/tmp: cannot be read as text"),
        (("--text", "/dev/null"), "/dev/null: there is no text in it"),
        (("--calibrate", "/dev/null"), "/dev/null: there is no text in it"),
        (("--length", "1"), "expected a number from 2 up"),
    ],
)
def test_what_a_user_gets_wrong(model, text, options, words, capsys):
    assert run(model, text, *options) != 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_models_of_another_shape_are_refused(tmp_path, model, text, capsys):
    other = {**FIX_B, "intermediate_size": 64}
    folder = write_folder(tmp_path / "other", other, tokenizer=True)
    assert run(model, text, "--compare", folder, "--no-speed") == 1
    assert "its matrices are not those of" in " ".join(capsys.readouterr().err.split())
