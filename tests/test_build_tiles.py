"""The launch choices in a build: one for every product, taken, and tuned."""

from __future__ import annotations

import json
import warnings

import compiled_builds
import mlx.core as mx
import pytest
from compiled_builds import compiled

import husky_mlx.pack
from husky_mlx import chips, tile_table
from husky_mlx.compilation import compile_model
from husky_mlx.fused import fused_weights
from husky_mlx.launches import launch_lines
from husky_mlx.loading import load
from husky_mlx.ops.gemv import Platform, gemv_tile
from husky_mlx.policy import policy
from husky_mlx.tiles import GemvShape, GemvTile

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

    def test_what_tuning_found_goes_into_the_table(self, monkeypatch):
        m1 = chips.parse("m1")[0]
        keys = [("o_proj_add", GemvShape(1, 64, columns), 4) for columns in (64, 128)]
        monkeypatch.setattr(tile_table, "products", lambda layouts, tied: keys)
        tuned = {keys[1]: GemvTile(8, 4, 2, 1, integer=True)}
        stored = json.loads(json.dumps(tile_table.tile_table({}, False, m1, tuned)))
        found = tile_table.from_json(stored)
        assert found == {keys[0]: policy(*keys[0], m1)} | tuned

    def test_tuning_needs_the_targets_gpu(self, copy):
        for target in ("cpu", "m3pro"):
            with pytest.raises(ValueError, match="--tune times kernels on this machine's GPU"):
                compile_model(copy, target, tune=True, notify=lambda text: None)
