"""Chip names, their figures and what MLX reports for them: no GPU is asked."""

from __future__ import annotations

import pytest

from husky_mlx import chips


# Apple's technical specifications of the Macs with these chips: GPU cores, GB/s.
@pytest.mark.parametrize(
    ("name", "generation", "cores", "bandwidth"),
    [
        ("m1", 13, 7, 68.3),
        ("m1-8c", 13, 8, 68.3),
        ("m1max-32c", 13, 32, 400),
        ("m2ultra-76c", 14, 76, 800),
        ("m3pro", 15, 14, 150),
        ("m3pro-18c", 15, 18, 150),
        ("m3max", 15, 30, 300),
        ("m3max-40c", 15, 40, 400),
        ("m3ultra-80c", 15, 80, 819),
        ("M4 Max", 16, 32, 410),
        ("m4max-40c", 16, 40, 546),
        ("m4-8c", 16, 8, 120),
        ("A18 Pro", 17, 5, 60),
        ("m5-10c", 17, 10, 153),
        ("m5pro", 17, 16, 307),
        ("m5max", 17, 32, 460),
        ("m5max-40c", 17, 40, 614),
        ("m5ultra-80c", 17, 80, 1200),
        ("m6", 18, 12, 153),
    ],
)
def test_apple_names(name, generation, cores, bandwidth):
    chip = chips.parse(name)
    assert (chip.generation, chip.cores, chip.bandwidth) == (generation, cores, bandwidth)
    assert chip.target == "metal"


def test_cuda_names_are_compute_capabilities():
    chip = chips.parse("sm_90a")
    assert (chip.target, chip.generation, chip.name) == ("cuda", 90, "sm_90")
    for capability in (80, 86, 89, 90, 100, 120):
        assert chips.parse(f"sm_{capability}").generation == capability


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m4max-36c", "m4max-32c, m4max-40c"),
        ("m4ultra", "unknown chip 'm4ultra'; known: m1, m1pro"),
        ("m9", "sm_120"),
        ("sm_75", "unknown chip 'sm_75'"),
        ("", "unknown chip ''"),
    ],
)
def test_unknown_names_list_what_is_known(text, says):
    with pytest.raises(ValueError, match="chip") as error:
        chips.parse(text)
    assert says in str(error.value)


def test_every_apple_name_parses_to_its_lowest_bin_and_back():
    for name in chips.names():
        lowest = chips.parse(name)
        assert lowest.name == name
        assert chips.parse(f"{name}-{lowest.cores}c") is lowest
        # No Mac is below a MacBook Neo or near HBM.
        assert 60 <= lowest.bandwidth <= 1200
        assert lowest.memory == tuple(sorted(lowest.memory))


def test_detects_macs_by_what_metal_reports():
    info = {"device_name": "Apple M3 Max", "architecture": "applegpu_g15s", "memory_size": 1 << 36}
    assert chips.detect(info) == chips.parse("m3max")
    info = {"device_name": "Apple M1", "architecture": "applegpu_g13g"}
    assert chips.detect(info) == chips.parse("m1")
    info = {"device_name": "Apple A18 Pro", "architecture": "applegpu_g17p"}
    assert chips.detect(info) == chips.parse("a18pro")


def test_a_newer_mac_keeps_its_generation_and_gets_cautious_figures():
    chip = chips.detect({"device_name": "Apple M9 Ultra", "architecture": "applegpu_g21d"})
    assert (chip.target, chip.generation) == ("metal", 21)
    assert chip.cores <= chips.parse("m3").cores
    assert chip.bandwidth <= chips.parse("m1").bandwidth


def test_detects_nvidia_gpus():
    hopper = {"compute_capability_major": 9, "compute_capability_minor": 0}
    known = chips.detect({"device_name": "NVIDIA H200", **hopper})
    assert (known.generation, known.cores, known.bandwidth) == (90, 132, 4800)
    other = chips.detect({"device_name": "NVIDIA Something", **hopper})
    assert (other.generation, other.bandwidth) == (90, chips.parse("sm_90").bandwidth)
    assert chips.detect({"architecture": "sm_120"}).generation == 120
    ada = {"compute_capability_major": 8, "compute_capability_minor": 9}
    assert chips.detect({"device_name": "NVIDIA GeForce RTX 4090", **ada}).cores == 128
    # 76 multiprocessors on half the bus.
    laptop = chips.detect({"device_name": "NVIDIA GeForce RTX 4090 Laptop GPU", **ada})
    assert laptop == chips.parse("sm_89")
    assert chips.detect({"architecture": "sm_75"}).generation == 75


def test_what_is_no_gpu_is_unknown():
    assert chips.detect({"device_name": "Intel(R) Xeon(R)", "architecture": "x86_64"}) == (
        chips.UNKNOWN
    )
