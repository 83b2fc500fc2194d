"""A kernel as ``mx.fast.metal_kernel`` has it: checks of the call, two runs, the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from husky_mlx import kernel_signature
from husky_mlx.emulator import compiler, launch, translate
from husky_mlx.emulator.errors import EmulatorError

SIMDGROUP = 32
LARGEST_THREADGROUP = 1024
# Metal's argument table, facts about inputs included.
MOST_BUFFERS = 31
# Bytes, Metal's.
THREADGROUP_MEMORY = 32768
# Two fills, so that no value of a body can look like both.
_FILLS = (0xFF, 0x5A)


class Outputs(list):
    """The outputs in order. ``updated`` has the inputs written in place, by name."""

    def __init__(self, arrays: Sequence, updated: dict):
        super().__init__(arrays)
        self.updated = updated


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
) -> MetalKernel:
    """A kernel with the arguments of ``mx.fast.metal_kernel``.

    ``source`` may use ``mutable_input(x)`` for a writable pointer to the memory of input ``x``.
    """
    return MetalKernel(name, input_names, output_names, source, header, ensure_row_contiguous)


class MetalKernel:
    """What ``metal_kernel`` returns; call it to run the kernel."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
    ):
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous

    def __call__(
        self,
        *,
        inputs: Sequence,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence,
        template: Sequence[tuple[str, object]] = (),
        check: str = "full",
        seed: int = 0,
        threadgroup_memory: int = THREADGROUP_MEMORY,
    ) -> Outputs:
        """Runs the kernel and returns its outputs.

        ``inputs`` are numpy or MLX arrays, or numbers (0-d). ``grid`` and ``threadgroup`` count
        threads in x, y, z. An output is an MLX array when its dtype is MLX's, else numpy's.
        ``check="full"`` checks every access and runs twice, with other memory fills and another
        order, which must not change a byte; ``check="fast"`` runs once and checks only that threads
        meet. ``threadgroup_memory``: bytes that a threadgroup may have, Metal's; CUDA's kernels may
        have more. Raises EmulatorError.
        """
        if check not in ("full", "fast"):
            raise ValueError(f"check={check!r}: 'full' or 'fast'")
        threadgroups = _threadgroups(grid, threadgroup)
        arrays = [self._contiguous(n, a) for n, a in zip(self.input_names, inputs, strict=True)]
        signature = self.signature(inputs, output_dtypes, template)
        if len(signature.buffers) > MOST_BUFFERS:
            raise EmulatorError(
                "arguments",
                f"{len(signature.buffers)} buffers with the shapes that the body names; Metal has "
                f"{MOST_BUFFERS}",
            )
        library = compiler.build(
            translate.runnable(signature, self.header, self.source),
            translate.address_spaces(signature, self.header, self.source),
            checked=check == "full",
        )
        itemsizes = [_itemsize(dtype) for dtype in output_dtypes]
        runs = []
        for repeat, fill in enumerate(_FILLS if check == "full" else _FILLS[:1]):
            buffers = _buffers(signature, self.input_names, arrays, output_shapes, itemsizes)
            launch.run(
                library,
                buffers,
                threadgroups,
                threadgroup,
                seed=2 * seed + repeat,
                fill=fill,
                checked=check == "full",
                track_inputs="mutable_input" in self.source + self.header,
                threadgroup_memory=threadgroup_memory,
            )
            runs.append(buffers)
        _compare(*runs)
        return self._outputs(runs[0], inputs, output_shapes, output_dtypes)

    def signature(
        self, inputs: Sequence, output_dtypes: Sequence, template: Sequence[tuple[str, object]] = ()
    ) -> kernel_signature.Signature:
        """The signature that MLX gives the kernel for these inputs."""
        types = [
            kernel_signature.ArrayType(kernel_signature.metal_type(a.dtype), tuple(a.shape))
            for a in (a if hasattr(a, "dtype") else mx.array(a) for a in inputs)
        ]
        elements = [kernel_signature.metal_type(dtype) for dtype in output_dtypes]
        return kernel_signature.build(
            self.name,
            self.input_names,
            types,
            self.output_names,
            elements,
            self.source,
            template,
        )

    def _contiguous(self, name: str, array) -> np.ndarray:
        data = _as_numpy(array)
        if not self.ensure_row_contiguous and not data.flags.c_contiguous:
            raise EmulatorError(
                "arguments",
                f"input '{name}' has strides {data.strides}; the emulator runs row-contiguous "
                "inputs only",
            )
        return np.array(data, order="C")

    def _outputs(self, buffers, inputs, output_shapes, output_dtypes) -> Outputs:
        given = dict(zip(self.input_names, inputs, strict=True))
        results = [b for b in buffers if b.role == "output"]
        return Outputs(
            [
                _as_array(buffer.data, shape, dtype)
                for buffer, shape, dtype in zip(results, output_shapes, output_dtypes, strict=True)
            ],
            {
                b.name: _as_array(b.data, given[b.name].shape, given[b.name].dtype)
                for b in buffers
                if b.role == "input" and b.written
            },
        )


def _threadgroups(grid: Sequence[int], threadgroup: Sequence[int]) -> list[int]:
    """How many threadgroups in x, y, z, after the checks that both GPUs' rules ask for."""
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if not 1 <= threads <= LARGEST_THREADGROUP or threads % SIMDGROUP:
        raise EmulatorError(
            "threadgroup size",
            f"threadgroup {tuple(threadgroup)} has {threads} threads; kernels take a multiple of "
            f"{SIMDGROUP} up to {LARGEST_THREADGROUP}",
        )
    if any(g < 1 or g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise EmulatorError(
            "grid",
            f"grid {tuple(grid)} is not a multiple of threadgroup {tuple(threadgroup)}: Metal "
            "would run smaller groups at its edge, CUDA whole ones",
        )
    return [g // t for g, t in zip(grid, threadgroup, strict=True)]


def _buffers(signature, input_names, arrays, output_shapes, itemsizes) -> list[launch.Buffer]:
    by_name = dict(zip(input_names, arrays, strict=True))
    outputs = iter(zip(output_shapes, itemsizes, strict=True))
    buffers = []
    for parameter in signature.buffers:
        if parameter.role == "input":
            data = by_name[parameter.name].flatten()
        elif parameter.role == "output":
            shape, itemsize = next(outputs)
            data = np.empty(int(np.prod(shape)) * itemsize, np.uint8)
            buffers.append(launch.Buffer(parameter.name, "output", data, itemsize))
            continue
        else:
            data = _fact(by_name[parameter.array], parameter.role)
        role = "input" if parameter.role == "input" else "shape"
        buffers.append(launch.Buffer(parameter.name, role, data, data.itemsize))
    return buffers


def _fact(array: np.ndarray, role: str) -> np.ndarray:
    if role == "shape":
        return np.array(array.shape, np.int32)
    if role == "strides":
        return np.array([step // array.itemsize for step in array.strides], np.int64)
    return np.array([array.ndim], np.int32)


def _compare(first: list[launch.Buffer], second: list[launch.Buffer] | None = None) -> None:
    """Raises when two runs of a kernel differ."""
    for a, b in zip(first, second or first, strict=True):
        different = np.flatnonzero(a.data.view(np.uint8) != b.data.view(np.uint8))
        if len(different):
            raise EmulatorError(
                "unstable output",
                f"{len(different)} bytes of {a.role} '{a.name}' depend on the order of threads or "
                f"on unwritten memory, the first in element {different[0] // a.element_size}",
            )


def _as_numpy(array) -> np.ndarray:
    if isinstance(array, mx.array):
        return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    return np.asarray(array) if hasattr(array, "dtype") else np.array(mx.array(array))


def _itemsize(dtype) -> int:
    return dtype.size if isinstance(dtype, mx.Dtype) else np.dtype(dtype).itemsize


def _as_array(data: np.ndarray, shape: Sequence[int], dtype):
    if not isinstance(dtype, mx.Dtype):
        return data.view(dtype).reshape(shape)
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(data.view(np.dtype(kernel_signature.dtype_name(dtype))).reshape(shape))
