"""Fixtures for kernels that run in the emulator, as they are or with a planted fault."""

from __future__ import annotations

import functools
from dataclasses import replace

from gemv_reference import EMULATED_MMA

from husky_mlx import chips, emulator, graphs, kernel_source, kernels
from husky_mlx.ops.gemv import Platform


def fast_emulator(monkeypatch):
    """Only the results matter here: the checks of each kernel have tests of their own."""

    def emulated(*arguments, **parts):
        return functools.partial(emulator.MetalKernel(*arguments, **parts), check="fast")

    defaults = {"header": "", "ensure_row_contiguous": True}
    monkeypatch.setattr(emulator, "metal_kernel", functools.partial(emulated, **defaults))
    kernels._kernel.cache_clear()
    yield
    kernels._kernel.cache_clear()


def emulated_cuda(monkeypatch):
    """Launches for CUDA run in the emulator from CUDA's text, its instructions emulated too."""

    @functools.cache
    def kernel(op, backend):
        assert backend == "cuda"
        source = kernel_source.kernel_source(op, cuda=True, overlay=EMULATED_MMA)
        return emulator.metal_kernel(
            name=op,
            input_names=source.inputs,
            output_names=source.outputs,
            header=source.header,
            source=source.numbered_source,
        )

    monkeypatch.setattr(kernels, "_kernel", kernel)


def kernels_of(monkeypatch):
    """``kernels_of(chip)``: from here on models find this chip, whose kernels are emulated."""

    def choose(chip="m1"):
        platform = Platform(chips.parse(chip)[0], "emulator")
        monkeypatch.setattr(graphs, "kernel_platform", lambda tiles=None: platform)

    return choose


def plant(monkeypatch):
    """``plant(op, old, new)`` changes a kernel's Metal source."""

    def change(op, old, new):
        def planted(name, **how):
            source = kernel_source.kernel_source(name, **how)
            if name != op:
                return source
            assert old in source.numbered_source
            return replace(source, numbered_source=source.numbered_source.replace(old, new))

        monkeypatch.setattr(kernels, "kernel_source", planted)
        kernels._kernel.cache_clear()

    yield change
    kernels._kernel.cache_clear()
