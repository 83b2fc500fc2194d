"""The launch choices in a build: one for every product, taken, and tuned."""

from __future__ import annotations

import json
import sys
import warnings

import compiled_builds
import mlx.core as mx
import pytest
from compiled_builds import compiled
from fixtures import FIX_B, mlx_weights, quantize_weights

import husky_mlx.pack
from husky_mlx import chips, tile_table
from husky_mlx.compilation import compile_model
from husky_mlx.fused import fused_weights
from husky_mlx.launches import launch_lines
from husky_mlx.loading import build_model, load
from husky_mlx.ops import gemv
from husky_mlx.ops.gemv import Platform, gemv_tile
from husky_mlx.policy import policy

hky = pytest.fixture(scope="module")(compiled_builds.hky)
copy = pytest.fixture(compiled_builds.copy)


class TestTiles:
    @pytest.mark.parametrize("chip", ["m1", "m4max-40c", "sm_90"])
    def test_a_build_has_a_tile_for_every_product_of_a_step(self, chip, copy):
        build = compiled(copy, chip, "4bit")
        stored = json.loads((build / "husky.json").read_text())["tiles"]
        tiles = tile_table.from_json(stored)
        there = chips.parse(chip)[0]
        assert tiles == {key: policy(*key, there) for key in tiles}
        asked = set()

        class Recording(dict):
            def get(self, key):
                asked.add(key)
                return tiles[key]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = load(str(build))
        frequencies = mx.array(model.args.rope.frequencies(model.args.head_dim))
        made = fused_weights(model.args, husky_mlx.pack.pack(model, frequencies))
        platform = Platform(there, "emulator", Recording())
        launch_lines(made, platform)
        for rows in (2, 3, 4):
            gemv_tile("o_proj_add", rows, made.layers[0].o_proj, platform)
        assert len(asked) > 6

    def test_a_tile_of_a_build_replaces_the_policys(self, copy):
        m1 = chips.parse("m1")[0]
        (key, tile), *_ = tile_table.from_json(
            json.loads((compiled(copy, "m1", "4bit") / "husky.json").read_text())["tiles"]
        ).items()
        other = type(tile)(8, 4, 1, 2, norm=tile.norm)

        class Matrix:
            rows, columns, bits, dtype = key[1].n, key[1].k, key[2], mx.float32

        found = gemv_tile(
            key[0], key[1].m, Matrix, Platform(m1, "metal", {key: other}), key[1].norm
        )
        assert found == other != gemv_tile(key[0], key[1].m, Matrix, Platform(m1, "metal"), True)

    def test_tuning_takes_what_is_faster_right_and_fits(self, copy, monkeypatch):
        """On the emulator, with figures of its own: fewer simdgroups and more unrolling win."""
        from husky_mlx import tuning

        m1 = chips.parse("m1")[0]
        wide = {**FIX_B, "head_dim": 16}
        model = build_model(wide, quantize_weights(mlx_weights(wide), 4, 32))
        used: list = []
        launched = gemv.launch_gemv

        def launch(op, matrix, tile, *rest, **options):
            used.append(tile)
            return launched(op, matrix, tile, *rest, **options)

        for module in list(sys.modules.values()):
            if getattr(module, "launch_gemv", None) is launched:
                monkeypatch.setattr(module, "launch_gemv", launch)

        def measure(case):
            case.ours.step(0, *case.ours.state)
            return used[-1].simdgroups * 10 - used[-1].unroll

        monkeypatch.setattr(tuning, "OPS", ("o_proj_add",))
        found = tuning.tune(model, m1, "emulator", measure)
        ((op, shape, bits), tile), *_ = found.items()
        assert (op, shape.n, shape.k, bits) == ("o_proj_add", 64, 64, 4)
        assert tile.simdgroups == 2 and tile != policy(op, shape, bits, m1)
        table = tile_table.tile_table({}, False, m1, found)
        assert table == []
        none = tuning.tune(model, m1, "emulator", lambda case: 1.0)
        assert none == {}

    def test_tuning_needs_the_targets_gpu(self, copy):
        for target in ("cpu", "m3pro"):
            with pytest.raises(ValueError, match="--tune times kernels on this machine's GPU"):
                compile_model(copy, target, tune=True, notify=lambda text: None)
