"""What ``husky doctor`` finds fastest: how it is timed, kept, and followed by ``load``."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import bench_fakes
import mlx.core as mx
import mlx_lm
import pytest
from fixtures import FIX_A, write_folder

from husky_mlx import choices, doctor_model, loading, paths, records
from husky_mlx.doctor_report import OK
from husky_mlx.dropin import DropIn

fake_engines = pytest.fixture(bench_fakes.fake_engines)


class TestChoice:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HUSKY_CACHE_DIR", str(tmp_path / "cache"))
        for name in ("HUSKY_CHOICE", "HUSKY_EAGER", "HUSKY_KERNELS", "HUSKY_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("HUSKY_BACKEND", raising=False)
        self.folder = str(write_folder(tmp_path / "model", tokenizer=True))

    @pytest.mark.parametrize(
        ("speeds", "way"),
        [
            ((100.0, 50.0, 60.0), "husky"),
            # Within the noise of a machine.
            ((100.0, 50.0, 104.0), "husky"),
            ((100.0, 50.0, 106.0), "mlx-lm"),
            ((100.0, 120.0, 110.0), "reference"),
        ],
    )
    def test_the_fastest_by_more_than_noise_wins(self, monkeypatch, speeds, way):
        timed = dict(zip(("husky", "reference", "mlx-lm"), speeds, strict=True))
        monkeypatch.setattr(doctor_model, "decode_speeds", lambda name: timed)
        *_, found = doctor_model.model_checks(self.folder)
        assert (found.name, found.state, found.found.startswith(way)) == ("fastest", OK, True)
        assert choices.remembered(FIX_A) == (way, timed)
        for other in ({"hidden_size": 128}, {"torch_dtype": "float16"}, {"dtype": "bfloat16"}):
            assert choices.remembered({**FIX_A, **other}) is None

    @pytest.mark.parametrize(
        "name, value", [("HUSKY_KERNELS", "0"), ("HUSKY_EAGER", "1"), ("HUSKY_NATIVE", "exact")]
    )
    def test_what_was_timed_under_a_variable_is_not_kept(self, monkeypatch, name, value):
        timed = {"husky": 1.0, "reference": 1.0, "mlx-lm": 2.0}
        monkeypatch.setattr(doctor_model, "decode_speeds", lambda name: timed)
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            *_, found = doctor_model.model_checks(self.folder)
        assert f"not kept, because {name}={value} changes what runs" in found.found
        assert choices.remembered(FIX_A) is None
        self.remember("mlx-lm")
        monkeypatch.setenv(name, value)
        assert choices.remembered(FIX_A) is None

    def remember(self, way):
        choices.remember(FIX_A, choices.Choice(way, {"husky": 1.0, "reference": 2.0}))

    def test_load_follows_it_and_the_plan_says_so(self):
        self.remember("husky")
        model, _ = loading.load(self.folder)
        assert "chosen: husky, by husky doctor" in model.plan.summary
        assert model.plan.eager_reason is None
        self.remember("reference")
        model, _ = loading.load(self.folder)
        assert "husky doctor timed it as the fastest here" in model.plan.summary
        cache = model.make_cache()
        mx.eval(model(mx.array([[5, 6]]), cache=cache), model(mx.array([[7]]), cache=cache))
        assert {name for name, count in model.plan.counts.items() if count} == {"reference"}

    def test_mlx_lms_class_is_said_on_stderr(self, capsys):
        self.remember("mlx-lm")
        model, _ = loading.load(self.folder)
        assert type(model).__module__ == "mlx_lm.models.llama"
        said = "runs on mlx-lm's model class: chosen: mlx-lm, by husky doctor"
        assert said in capsys.readouterr().err
        loading.load(self.folder, verbose=True)
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1

    @pytest.mark.parametrize("limit", ["max_context", "max_kv_size"])
    def test_limits_that_ours_alone_has_come_first_and_the_plan_says_nothing_else(self, limit):
        self.remember("mlx-lm")
        model, _ = loading.load(self.folder, **{limit: 64})
        assert type(model).__module__.startswith("husky_mlx")
        assert model.plan.choice is None and "chosen" not in model.plan.summary

    def test_the_commands_of_mlx_lm_follow_it_too(self):
        self.remember("reference")
        for backend, follows in ((None, True), ("husky", False)):
            with DropIn(backend):
                model, _ = mlx_lm.load(self.folder)
            assert (model.plan.choice is not None) == follows

    @pytest.mark.parametrize("how", ["argument", "HUSKY_BACKEND", "HUSKY_CHOICE"])
    def test_who_asks_for_something_gets_it(self, monkeypatch, how):
        self.remember("mlx-lm")
        if how == "argument":
            model, _ = loading.load(self.folder, backend="husky")
        else:
            monkeypatch.setenv(how, "husky" if how == "HUSKY_BACKEND" else "0")
            model, _ = loading.load(self.folder)
        assert model.plan.choice is None

    def test_two_that_keep_at_the_same_time_lose_nothing(self, tmp_path, monkeypatch):
        read = records.read

        def slow(path):
            kept = read(path)
            time.sleep(0.05)
            return kept

        monkeypatch.setattr(records, "read", slow)
        path = tmp_path / "new folder" / "facts.json"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda key: records.keep(path, key, True), "abcd"))
        assert read(path) == dict.fromkeys("abcd", True)

    @pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "{"])
    def test_a_damaged_file_is_no_choice(self, content):
        paths.write_whole(choices.path(), content.encode())
        assert choices.remembered(FIX_A) is None
        records.keep(choices.path(), choices._key(FIX_A), {"way": 3})
        assert choices.remembered(FIX_A) is None

    def test_what_is_timed_is_what_the_ways_are(self, fake_engines):
        log = fake_engines()
        found = doctor_model.decode_speeds("x")
        # The fake's trial n makes 10 n tokens a second; the first is the cold one, two are timed.
        assert found == dict.fromkeys(("husky", "reference", "mlx-lm"), 25.0)
        entries = log()
        ran = {
            entry["name"]: entry["specification"] for entry in entries if "specification" in entry
        }
        assert set(ran) == {"husky", "husky-eager", "mlx-lm"}
        assert {told["model"] for told in ran.values()} == {"x"}
        asked = [entry["request"] for entry in entries if "request" in entry]
        assert {each["generation_tokens"] for each in asked} == {64}
