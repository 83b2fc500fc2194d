"""Facts of the chips that the kernels are tuned for: GPU cores, memory bandwidth, generation.

Where a comment below is a path like ``2020/11/apple-unleashes-m1`` the figures are those of the
post at https://www.apple.com/newsroom/ with that path, and a number is a page of technical
specifications at https://support.apple.com/en-us/ with the bins that the posts leave out. All were
checked on 2026-11-30 against reports that quote these pages. Generations are the number in the
architecture that MLX reports: ``applegpu_g13s`` is 13. There is no M4 Ultra, and of M6 only the
base chip.

NVIDIA's figures come from the data sheets of the products named (https://www.nvidia.com/en-us/
data-center/, geforce/ and autonomous-machines/ under it) and the multiprocessors that CUDA reports
for them; for a GPU that is not named, a small one of its compute capability stands in.

TFLOPS of Apple's GPUs: 128 fused multiply-adds a core and cycle, at the clock that Apple's own
TFLOPS give, 2.6 for M1's 8 cores (2020/11/apple-unleashes-m1) and 3.6 for M2's 10 (2022/06). Of
later chips none were published. NVIDIA's are the data sheets' dense 16-bit ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from husky_mlx.errors import UsageError


@dataclass(frozen=True)
class Chip:
    """One GPU. ``bandwidth`` in GB/s (10^9), ``memory`` in GB, the sizes that it is sold with.

    ``tflops``: 10^12 operations a second in 16-bit matrix products, None where none are known.

    ``stand_in``: cores and bandwidth are those of a smaller GPU, the tables have none of this one.

    ``generation`` is Apple's GPU generation (13 to 18) or CUDA's compute capability (80 to 121); 0
    means unknown. ``cores`` are Apple's GPU cores or NVIDIA's multiprocessors.
    """

    name: str
    target: str
    generation: int
    cores: int
    bandwidth: float
    memory: tuple[int, ...] = ()
    tflops: float | None = None
    stand_in: bool = False


# Apple's GPU generation -> GFLOPS a core: 256 operations a cycle.
_GFLOPS_A_CORE = {13: 325.0, 14: 360.0}


def _apple(name: str, generation: int, *bins: tuple[int, float, tuple[int, ...]]) -> list[Chip]:
    gflops = _GFLOPS_A_CORE.get(generation)
    return [
        Chip(
            *(name, "metal", generation, cores, bandwidth, memory),
            tflops=None if gflops is None else cores * gflops / 1000,
        )
        for cores, bandwidth, memory in bins
    ]


# Bins of a chip from the lowest up: GPU cores, GB/s, memory sizes in GB.
_APPLE: dict[str, list[Chip]] = {
    chips[0].name: chips
    for chips in (
        # 2020/11/apple-unleashes-m1; no bandwidth there: it is that of 128 bit of LPDDR4X-4266
        _apple("m1", 13, (7, 68.3, (8, 16)), (8, 68.3, (8, 16))),
        # 2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built
        _apple("m1pro", 13, (14, 200, (16, 32)), (16, 200, (16, 32))),
        _apple("m1max", 13, (24, 400, (32, 64)), (32, 400, (32, 64))),
        # 2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer
        _apple("m1ultra", 13, (48, 800, (64, 128)), (64, 800, (64, 128))),
        # 2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities
        _apple("m2", 14, (8, 100, (8, 16, 24)), (10, 100, (8, 16, 24))),
        # 2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows
        _apple("m2pro", 14, (16, 200, (16, 32)), (19, 200, (16, 32))),
        _apple("m2max", 14, (30, 400, (32, 64)), (38, 400, (32, 64, 96))),
        # 2023/06/apple-introduces-m2-ultra
        _apple("m2ultra", 14, (60, 800, (64, 128, 192)), (76, 800, (64, 128, 192))),
        # 2023/10/apple-unveils-m3-m3-pro-and-m3-max-the-most-advanced-chips-for-a-personal-computer
        # and 117736
        _apple("m3", 15, (8, 100, (8, 16, 24)), (10, 100, (8, 16, 24))),
        _apple("m3pro", 15, (14, 150, (18, 36)), (18, 150, (18, 36))),
        _apple("m3max", 15, (30, 300, (36, 96)), (40, 400, (48, 64, 128))),
        # 2025/03/apple-reveals-m3-ultra-taking-apple-silicon-to-a-new-extreme and 122211
        _apple("m3ultra", 15, (60, 819, (96, 256)), (80, 819, (96, 256, 512))),
        # 2024/05/apple-introduces-m4-chip, 2024/10/apple-introduces-m4-pro-and-m4-max, 121555 and
        # 122211
        _apple("m4", 16, (8, 120, (16, 24)), (10, 120, (16, 24, 32))),
        _apple("m4pro", 16, (16, 273, (24, 48, 64)), (20, 273, (24, 48, 64))),
        _apple("m4max", 16, (32, 410, (36,)), (40, 546, (48, 64, 128))),
        # 2026/03/say-hello-to-macbook-neo; applegpu_g17p, though its Metal family is M4's
        _apple("a18pro", 17, (5, 60, (8,))),
        # 2025/10/apple-unleashes-m5-the-next-big-leap-in-ai-performance-for-apple-silicon
        _apple("m5", 17, (8, 153, (16, 24, 32)), (10, 153, (16, 24, 32))),
        # 2026/03/apple-debuts-m5-pro-and-m5-max-to-supercharge-the-most-demanding-pro-workflows
        # and 126318
        _apple("m5pro", 17, (16, 307, (24, 48, 64)), (20, 307, (24, 48, 64))),
        _apple("m5max", 17, (32, 460, (36,)), (40, 614, (48, 64, 128))),
        # 2026/08/apple-introduces-new-mac-studio-with-m5-max-and-m5-ultra
        _apple("m5ultra", 17, (64, 1200, (96,)), (80, 1200, (96, 256, 512))),
        # 2026/08/apple-unveils-a-more-powerful-mac-mini-featuring-the-all-new-m6-and-m5-pro
        # and 128108
        _apple("m6", 18, (12, 153, (16,)), (12, 170, (24, 32))),
    )
}

# Compute capability -> multiprocessors, GB/s and TFLOPS of a small GPU that has it.
_CUDA: dict[int, tuple[int, float, float | None]] = {
    80: (56, 933, 165),  # A30
    86: (18, 168, None),  # RTX 3050 of 6 GB
    87: (16, 205, None),  # Jetson AGX Orin
    89: (24, 272, None),  # RTX 4060
    90: (114, 2000, 756),  # H100 PCIe
    100: (148, 8000, 2250),  # B200
    103: (148, 8000, None),  # B300; its chip has 160
    110: (20, 273, None),  # Jetson Thor
    120: (20, 320, None),  # RTX 5050
    121: (48, 273, None),  # GB10
}

# The device's name, as CUDA reports it -> multiprocessors, GB/s, GB, TFLOPS.
_NVIDIA: dict[str, tuple[int, float, tuple[int, ...], float]] = {
    "NVIDIA A100-PCIE-40GB": (108, 1555, (40,), 312),
    "NVIDIA A100-SXM4-40GB": (108, 1555, (40,), 312),
    "NVIDIA A100 80GB PCIe": (108, 1935, (80,), 312),
    "NVIDIA A100-SXM4-80GB": (108, 2039, (80,), 312),
    "NVIDIA GeForce RTX 3090": (82, 936, (24,), 71),
    "NVIDIA GeForce RTX 4090": (128, 1008, (24,), 165),
    "NVIDIA L40S": (142, 864, (48,), 362),
    "NVIDIA H100 80GB HBM3": (132, 3350, (80,), 989),
    "NVIDIA H200": (132, 4800, (141,), 989),
    "NVIDIA GeForce RTX 5090": (170, 1792, (32,), 209),
}

# The smallest Mac, a MacBook Neo: what suits it asks too much of nothing newer.
UNKNOWN = Chip("unknown", "unknown", 0, 5, 60, stand_in=True)
_GIB = 1 << 30


def names() -> list[str]:
    """Every name that ``parse`` takes for an Apple chip without its core count."""
    return list(_APPLE)


def parse(text: str, memory: int | None = None) -> tuple[Chip, str | None]:
    """The chip of a name such as ``m3pro``, ``m4max-40c`` (GPU cores) or ``sm_90``, and a note.

    ``memory`` in GB leaves the bins that are sold with it, and is then the chip's only size. Where
    several bins remain it is the lowest, and the note says so. Raises UsageError naming what is
    known.
    """
    key = re.sub(r"[\s_]", "", text.strip().lower())
    found = re.fullmatch(r"([am]\d+(?:pro|max|ultra)?)(?:-(\d+)c)?", key)
    if found and found[1] in _APPLE:
        return _bin(found[1], None if found[2] is None else int(found[2]), memory)
    capability = re.fullmatch(r"sm(\d+)a?", key)
    if capability and int(capability[1]) in _CUDA:
        return _sized(_cuda(int(capability[1])), memory), None
    raise UsageError(
        f"unknown chip {text!r}; known: {', '.join(_APPLE)} (with -40c, say, for 40 GPU cores), "
        f"{', '.join(f'sm_{number}' for number in _CUDA)}"
    )


def with_memory(chip: Chip, memory: int) -> tuple[Chip, str | None]:
    """The chip as ``parse`` gives it for its name and ``memory`` GB, and the note."""
    if chip.name in _APPLE:
        return _bin(chip.name, None, memory)
    return _sized(chip, memory), None


def _sized(chip: Chip, memory: int | None) -> Chip:
    """The chip with ``memory`` GB as its only size; as it is for None."""
    return chip if memory is None else replace(chip, memory=(memory,))


def parse_memory(text: str) -> int:
    """``16gb``, ``16 GB`` or ``16`` as GB. Raises UsageError for anything else."""
    found = re.fullmatch(r"(\d{1,5})\s*(?:gb)?", text.strip().lower())
    if not found or not int(found[1]):
        raise UsageError(f"memory must be given as 16gb, found {text!r}")
    return int(found[1])


def _bin(name: str, cores: int | None, memory: int | None) -> tuple[Chip, str | None]:
    bins = [chip for chip in _APPLE[name] if cores in (None, chip.cores)]
    if not bins:
        offered = ", ".join(dict.fromkeys(f"{name}-{chip.cores}c" for chip in _APPLE[name]))
        raise UsageError(f"chip {name!r}: none has {cores} GPU cores; known: {offered}")
    if memory is not None:
        sold = sorted({size for chip in bins for size in chip.memory})
        bins = [_sized(chip, memory) for chip in bins if memory in chip.memory]
        if not bins:
            raise UsageError(
                f"chip {name!r}: none has {memory} GB of memory"
                f"{'' if cores is None else f' and {cores} GPU cores'}; known: "
                f"{', '.join(map(str, sold))} GB"
            )
    if len(bins) == 1:
        return bins[0], None
    words = "; ".join(
        f"{name}-{chip.cores}c with {'/'.join(map(str, chip.memory))} GB, {chip.bandwidth:g} GB/s"
        for chip in bins
    )
    return bins[0], f"{name} may be {words}: the lowest is taken"


def detect(info: Mapping[str, str | int] | None = None) -> Chip:
    """The chip that MLX's ``device_info`` describes (asked for now if ``info`` is None)."""
    return identify(info)[0]


def identify(info: Mapping[str, str | int] | None = None) -> tuple[Chip, str | None]:
    """The same, and a note on what had to be assumed.

    MLX reports no GPU core count: a Mac's chip is the lowest bin that is sold with its memory. A
    newer chip than these tables know keeps its generation and gets the figures of ``UNKNOWN``.
    """
    info = mx.device_info() if info is None else info
    name, architecture = str(info.get("device_name", "")), str(info.get("architecture", ""))
    size = int(info.get("memory_size") or info.get("total_memory") or 0)
    memory = round(size / _GIB) or None
    if apple := re.fullmatch(r"applegpu_g(\d+)[a-z]?", architecture):
        return _mac(name or architecture, int(apple[1]), memory)
    capability = _capability(info, architecture)
    if capability is None:
        return UNKNOWN, None
    chip = _cuda(capability, name)
    if not chip.stand_in:
        return chip, None
    note = f"{name or chip.name} is not in the tables: a small GPU of {chip.name} stands in"
    return _sized(chip, memory), note


def _mac(name: str, generation: int, memory: int | None) -> tuple[Chip, str | None]:
    bins = _APPLE.get(re.sub(r"\s", "", name.lower()).removeprefix("apple"), [])
    if not bins or bins[0].generation != generation:
        chip = replace(UNKNOWN, name=name, target="metal", generation=generation)
        unknown = f"{name} is not in the tables: the figures of the smallest Mac stand in"
        return _sized(chip, memory), unknown
    if any(memory in chip.memory for chip in bins):
        return _bin(bins[0].name, None, memory)
    chip, note = _bin(bins[0].name, None, None)
    guessed = len({chip.bandwidth for chip in bins}) > 1
    return replace(_sized(chip, memory), stand_in=guessed), note


def _capability(info: Mapping[str, str | int], architecture: str) -> int | None:
    if "compute_capability_major" in info:
        major, minor = info["compute_capability_major"], info.get("compute_capability_minor", 0)
        return int(major) * 10 + int(minor)
    found = re.fullmatch(r"sm_(\d+)a?", architecture)
    return int(found[1]) if found else None


def _cuda(capability: int, device_name: str = "") -> Chip:
    name = f"sm_{capability}"
    if device_name in _NVIDIA:
        cores, bandwidth, memory, tflops = _NVIDIA[device_name]
        return Chip(name, "cuda", capability, cores, bandwidth, memory, tflops)
    small = _CUDA.get(capability, (UNKNOWN.cores, UNKNOWN.bandwidth, None))
    return Chip(name, "cuda", capability, *small[:2], tflops=small[2], stand_in=True)
