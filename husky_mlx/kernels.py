"""The one door for every launch of a fused kernel: on Metal, on CUDA or in the emulator.

Kernels are built at their first launch, once for each backend. ``record`` sees every launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from husky_mlx import cuda_binary, cuda_source, device, kernel_signature
from husky_mlx.kernel_signature import SMALLEST_DEVICE_INPUT, ArrayType, metal_type
from husky_mlx.kernel_source import KernelSource, kernel_source, metal_prelude

BACKENDS = ("metal", "cuda", "emulator")
# Launches for CUDA that are only recorded: their outputs are placeholders.
OUTLINE = "outline"
TAKE_CUDA_TEXT = ("cuda", OUTLINE)
Grid = tuple[int, int, int]
ArraySpec = tuple[Sequence[int], mx.Dtype]

_recorders = threading.local()


@dataclass(frozen=True)
class Launch:
    """One launch as it was made: arrays by parameter name, grids in threads."""

    op: str
    backend: str
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.array]
    template: dict[str, Any]
    grid: Grid
    threadgroup: Grid


def default_backend() -> str:
    """The backend of MLX's default device. Raises ValueError on its CPU build."""
    target = device.target()
    if target == "cpu":
        raise ValueError(
            "kernels run on Metal and CUDA; MLX's default device is the CPU, where only "
            "backend='emulator' runs them"
        )
    return target


def launch(
    op: str,
    inputs: Mapping[str, mx.array],
    outputs: Sequence[ArraySpec],
    template: Mapping[str, Any],
    grid: Grid,
    threadgroup: Grid,
    backend: str | None = None,
) -> list[mx.array]:
    """The outputs of kernel ``op``, in its order; lazy but in the emulator.

    ``inputs`` and ``template`` have a value for each name that ``metal_kernels/<op>.metal``
    declares, ``outputs`` a (shape, dtype) each. ``grid`` counts threads and is a multiple of
    ``threadgroup``. ``backend`` is one of BACKENDS or OUTLINE, by default that of MLX's default
    device. Inputs that the kernel writes in place are changed on every backend. Raises ValueError
    for names, numbers of outputs or grids that do not fit, and for a kernel that does not exist.
    """
    return Prepared(op, inputs, outputs, template, grid, threadgroup, backend)()


class Prepared:
    """A launch whose arguments have been checked, to be made again and again; as ``launch``."""

    def __init__(
        self,
        op: str,
        inputs: Mapping[str, mx.array],
        outputs: Sequence[ArraySpec],
        template: Mapping[str, Any],
        grid: Grid,
        threadgroup: Grid,
        backend: str | None = None,
    ):
        backend = default_backend() if backend is None else backend
        source = kernel_source(op, cuda=backend in TAKE_CUDA_TEXT)
        _check_names(op, "inputs", source.inputs, inputs)
        _check_names(op, "template", source.template, template)
        if len(outputs) != len(source.outputs):
            raise ValueError(f"[{op}] has {len(source.outputs)} outputs, {len(outputs)} given")
        _check_grid(op, grid, threadgroup)
        self._launch = (op, backend, inputs, template, source.outputs)
        self._kernel = _kernel(op, backend)
        self._call: dict[str, Any] = {
            "inputs": [inputs[name] for name in source.inputs],
            "template": [(name, template[name]) for name in source.template],
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": [tuple(shape) for shape, _ in outputs],
            "output_dtypes": [dtype for _, dtype in outputs],
        }

    def __call__(self) -> list[mx.array]:
        op, backend, inputs, template, names = self._launch
        made = self._kernel(**self._call)
        # The emulator computes on copies.
        for name, array in getattr(made, "updated", {}).items():
            inputs[name][...] = array
        arrays = list(made)
        for seen in getattr(_recorders, "watching", ()):
            dtypes = [array.dtype for array in self._call["inputs"]]
            seen.add((op, *dtypes, *self._call["template"]))
        for launches in getattr(_recorders, "active", ()):
            named = dict(zip(names, arrays, strict=True))
            grids = (self._call["grid"], self._call["threadgroup"])
            launches.append(Launch(op, backend, dict(inputs), named, dict(template), *grids))
        return arrays


@contextmanager
def watch() -> Iterator[set[tuple]]:
    """The kernels that this thread launches meanwhile, by name, types and template values."""
    seen: set[tuple] = set()
    _recorders.watching = (*getattr(_recorders, "watching", ()), seen)
    try:
        yield seen
    finally:
        _recorders.watching = _recorders.watching[:-1]


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect this thread's launches: ``with record() as launches: ...``."""
    launches: list[Launch] = []
    _recorders.active = (*getattr(_recorders, "active", ()), launches)
    try:
        yield launches
    finally:
        _recorders.active = _recorders.active[:-1]


def replay(launches: Sequence[Launch], backend: str) -> list[list[mx.array]]:
    """Make recorded launches again on ``backend``; each one's outputs, in order.

    Where a launch took another's output it now takes the new one; other inputs are as recorded:
    not those of a traced function, and nothing may have been computed between the launches.
    """
    renewed: dict[int, mx.array] = {}
    results = []
    for made in launches:
        inputs = {name: renewed.get(id(array), array) for name, array in made.inputs.items()}
        specs = [(array.shape, array.dtype) for array in made.outputs.values()]
        arrays = launch(made.op, inputs, specs, made.template, made.grid, made.threadgroup, backend)
        old = made.outputs.values()
        renewed.update({id(before): after for before, after in zip(old, arrays, strict=True)})
        results.append(arrays)
    return results


@functools.cache
def _kernel(op: str, backend: str) -> Callable:
    """The kernel as the backend's callable, with the arguments of ``mx.fast.metal_kernel``'s."""
    if backend == OUTLINE:
        return _placeholders
    source = kernel_source(op, cuda=backend == "cuda")
    if backend == "cuda":
        return _CudaKernel(op, source)
    parts: dict[str, Any] = {
        "name": f"husky_{op}",
        "input_names": list(source.inputs),
        "output_names": list(source.outputs),
    }
    if backend == "metal":
        prelude = metal_prelude() if "mutable_input" in source.source + source.header else ""
        kernel: Any = mx.fast.metal_kernel(
            **parts, header=prelude + source.header, source=source.source
        )
        return kernel
    if backend == "emulator":
        # Only here: it looks for a compiler.
        from husky_mlx.emulator import metal_kernel

        # With the file's own line numbers in its messages.
        return metal_kernel(**parts, header=source.header, source=source.numbered_source)
    raise ValueError(f"backend {backend!r}: one of {', '.join(BACKENDS)}")


def _placeholders(
    *, output_shapes: Sequence[Sequence[int]], output_dtypes: Sequence[mx.Dtype], **call: Any
) -> list[mx.array]:
    return [
        mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
    ]


class _CudaKernel:
    """A kernel that is translated and built once for each set of types and template values."""

    def __init__(self, op: str, source: KernelSource):
        self._op = op
        self._source = source
        self._built: dict[tuple, Callable] = {}

    def __call__(self, *, inputs: Sequence[mx.array], template: Sequence, **call: Any) -> list:
        # All that a signature depends on: to build one for each launch would take longer than to
        # launch.
        kinds = [(x.dtype, x.ndim > 0, x.size < SMALLEST_DEVICE_INPUT) for x in inputs]
        key = (*kinds, *call["output_dtypes"], *template)
        if key not in self._built:
            self._built[key] = self._build(inputs, template, call["output_dtypes"])
        return self._built[key](inputs=list(inputs), **call)

    def _build(
        self, inputs: Sequence[mx.array], template: Sequence, output_dtypes: Sequence[mx.Dtype]
    ) -> Callable:
        source = self._source
        signature = kernel_signature.build(
            self._op,
            source.inputs,
            [ArrayType(metal_type(array.dtype), tuple(array.shape)) for array in inputs],
            source.outputs,
            [metal_type(dtype) for dtype in output_dtypes],
            source.source,
            template,
        )
        translated = cuda_source.translate(signature, source.header, source.source)
        arguments = cuda_source.kernel_arguments(
            translated, f"husky_{self._op}", source.inputs, source.outputs
        )
        suffix = cuda_binary.compiled_for()
        if suffix is not None:
            arguments["name"] += f"_{suffix}"
            cuda_binary.provide(arguments["name"], translated, signature)
        kernel: Any = mx.fast.cuda_kernel(**arguments)
        return kernel


def _check_names(op: str, what: str, declared: Sequence[str], given: Mapping[str, object]) -> None:
    if len(given) == len(declared) and all(name in given for name in declared):
        return
    missing = [name for name in declared if name not in given]
    extra = [name for name in given if name not in declared]
    raise ValueError(
        f"[{op}] {what}: missing {', '.join(missing) or 'none'}; "
        f"not declared {', '.join(extra) or 'none'}"
    )


def _check_grid(op: str, grid: Grid, threadgroup: Grid) -> None:
    """Metal would run smaller threadgroups at the edge of a grid, CUDA whole ones."""
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    fits = all(g >= 1 and g % t == 0 for g, t in zip(grid, threadgroup, strict=True))
    if not fits or threads % 32 or threads > 1024:
        raise ValueError(
            f"[{op}] grid {grid}, threadgroup {threadgroup}: the grid must be a multiple of the "
            "threadgroup, and that must have a multiple of 32 threads up to 1024"
        )
