"""Chip names, their figures and what MLX reports for them: no GPU is asked."""

from __future__ import annotations

import pytest

from husky_mlx import chips


# A second copy of the table, whose sources it names: a slip of the pen in one of both is seen.
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
    chip = chips.parse(name)[0]
    assert (chip.generation, chip.cores, chip.bandwidth) == (generation, cores, bandwidth)
    assert chip.target == "metal"


def test_cuda_names_are_compute_capabilities():
    chip = chips.parse("sm_90a")[0]
    assert (chip.target, chip.generation, chip.name) == ("cuda", 90, "sm_90")
    for capability in (80, 86, 89, 90, 100, 120):
        assert chips.parse(f"sm_{capability}")[0].generation == capability


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


@pytest.mark.parametrize(
    ("name", "memory", "cores", "bandwidth", "note"),
    [
        ("m3pro", None, 14, 150, "m3pro-18c with 18/36 GB, 150 GB/s: the lowest is taken"),
        ("m3pro-18c", None, 18, 150, None),
        ("m3pro", 36, 14, 150, "m3pro-14c with 36 GB"),
        # These sizes are sold with one of the two only.
        ("m4max", 36, 32, 410, None),
        ("m4max", 64, 40, 546, None),
        ("m2max", 96, 38, 400, None),
        # One number of cores, two speeds of memory.
        ("m6-12c", None, 12, 153, "m6-12c with 24/32 GB, 170 GB/s"),
        ("m6", 32, 12, 170, None),
        ("sm_90", 80, 114, 2000, None),
    ],
)
def test_what_a_name_leaves_open_is_the_lowest_bin_and_said(name, memory, cores, bandwidth, note):
    chip, said = chips.parse(name, memory)
    assert (chip.cores, chip.bandwidth) == (cores, bandwidth)
    assert said is None if note is None else note in said
    if memory is not None:
        assert chip.memory == (memory,)


def test_memory_that_no_bin_has_lists_the_sizes_sold():
    with pytest.raises(ValueError, match=r"none has 12 GB of memory; known: 8, 16 GB"):
        chips.parse("m1", 12)
    with pytest.raises(ValueError, match=r"36 GB of memory and 40 GPU cores; known: 48, 64, 128"):
        chips.parse("m4max-40c", 36)


@pytest.mark.parametrize(("text", "size"), [("16gb", 16), ("128 GB", 128), ("8", 8)])
def test_memory_in_words(text, size):
    assert chips.parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "0gb", "-8", "16mb", "1e3", "16gbb"])
def test_memory_that_is_none(text):
    with pytest.raises(ValueError, match="memory must be given as 16gb"):
        chips.parse_memory(text)


@pytest.mark.parametrize(
    # Apple's own figures, where it published any.
    ("name", "tflops"),
    [
        *(("m1-8c", 2.6), ("m1pro-16c", 5.2), ("m1max-32c", 10.4), ("m1ultra-64c", 21)),
        *(("m2-10c", 3.6), ("m2pro-19c", 6.8), ("m2max-38c", 13.6), ("m2ultra-76c", 27.2)),
    ],
)
def test_tflops_are_apples(name, tflops):
    assert chips.parse(name)[0].tflops == pytest.approx(tflops, rel=0.02)


@pytest.mark.parametrize("name", ["m3", "m4max", "a18pro", "m5", "m6", "sm_86"])
def test_tflops_that_nobody_published_are_not_made_up(name):
    assert chips.parse(name)[0].tflops is None


def test_every_apple_name_parses_to_its_lowest_bin_and_back():
    for name in chips.names():
        lowest = chips.parse(name)[0]
        assert lowest.name == name
        assert chips.parse(f"{name}-{lowest.cores}c")[0] is lowest
        # No Mac is below a MacBook Neo or near HBM.
        assert 60 <= lowest.bandwidth <= 1200
        assert lowest.memory == tuple(sorted(lowest.memory))


def mac(name, architecture, gibibytes):
    return {
        "device_name": f"Apple {name}",
        "architecture": architecture,
        "memory_size": gibibytes << 30,
    }


@pytest.mark.parametrize(
    ("name", "architecture", "memory", "cores", "bandwidth"),
    [
        ("M3 Max", "applegpu_g15s", 36, 30, 300),
        ("M3 Max", "applegpu_g15s", 64, 40, 400),
        ("M2 Max", "applegpu_g14s", 96, 38, 400),
        ("M1", "applegpu_g13g", 16, 7, 68.3),
        ("A18 Pro", "applegpu_g17p", 8, 5, 60),
        ("M6", "applegpu_g18g", 24, 12, 170),
    ],
)
def test_detects_macs_by_name_and_memory(name, architecture, memory, cores, bandwidth):
    found = chips.detect(mac(name, architecture, memory))
    assert (found.cores, found.bandwidth, found.memory) == (cores, bandwidth, (memory,))
    assert not found.stand_in


def test_what_is_assumed_about_a_mac_is_said():
    assert chips.identify(mac("M3 Max", "applegpu_g15s", 64))[1] is None
    assert "m1-7c" in chips.identify(mac("M1", "applegpu_g13g", 16))[1]
    # No bin is sold with so much: the lowest, whose bandwidth may be another's.
    found, note = chips.identify(mac("M3 Max", "applegpu_g15s", 192))
    assert (found.cores, found.memory, found.stand_in) == (30, (192,), True)
    assert "the lowest is taken" in note
    found, note = chips.identify(mac("M9", "applegpu_g21g", 32))
    assert found.stand_in and "not in the tables" in note


def test_a_newer_mac_keeps_its_generation_and_gets_cautious_figures():
    chip = chips.detect({"device_name": "Apple M9 Ultra", "architecture": "applegpu_g21d"})
    assert (chip.target, chip.generation) == ("metal", 21)
    assert chip.cores <= chips.parse("m3")[0].cores
    assert chip.bandwidth <= chips.parse("m1")[0].bandwidth


def test_detects_nvidia_gpus():
    hopper = {"compute_capability_major": 9, "compute_capability_minor": 0}
    known = chips.detect({"device_name": "NVIDIA H200", **hopper})
    assert (known.generation, known.cores, known.bandwidth) == (90, 132, 4800)
    assert not known.stand_in
    for name in ("NVIDIA H200 NVL", "NVIDIA H2000", "An NVIDIA H200", "NVIDIA Something"):
        assert chips.detect({"device_name": name, **hopper}).stand_in
    other = chips.detect({"device_name": "NVIDIA Something", **hopper})
    assert (other.generation, other.bandwidth) == (90, chips.parse("sm_90")[0].bandwidth)
    assert chips.detect({"architecture": "sm_120"}).generation == 120
    ada = {"compute_capability_major": 8, "compute_capability_minor": 9}
    assert chips.detect({"device_name": "NVIDIA GeForce RTX 4090", **ada}).cores == 128
    # 76 multiprocessors on half the bus.
    laptop = chips.detect({"device_name": "NVIDIA GeForce RTX 4090 Laptop GPU", **ada})
    assert laptop == chips.parse("sm_89")[0] and laptop.stand_in
    info = {"device_name": "NVIDIA GeForce RTX 3080", "total_memory": 10 << 30}
    info |= {"compute_capability_major": 8, "compute_capability_minor": 6}
    found, note = chips.identify(info)
    assert (found.stand_in, found.memory) == (True, (10,))
    assert "NVIDIA GeForce RTX 3080 is not in the tables" in note
    assert chips.detect({"architecture": "sm_75"}).generation == 75


def test_what_is_no_gpu_is_unknown():
    assert chips.detect({"device_name": "Intel(R) Xeon(R)", "architecture": "x86_64"}) == (
        chips.UNKNOWN
    )
