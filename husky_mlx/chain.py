"""A step's launches as one: which arrays they pass on, and a table of what is launched with what.

The table is data and not part of the kernel's text: a cache that grows changes numbers in it and
compiles nothing anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from husky_mlx import kernel_signature
from husky_mlx.kernel_signature import ArrayType, Signature, metal_type
from husky_mlx.kernel_source import KernelSource, kernel_source
from husky_mlx.kernels import Launch

# As in metal_kernels/prelude/chain.h.
RECORD, POINTERS, SHAPES, SHAPE_SIZE = 24, 4, 16, 4
REGION = 256  # bytes that arrays between launches are aligned to
# Inputs that kernels read before they wait for the launch before theirs.
READ_EARLY = ("residual", "place")
# Of 4 KiB for the parameters of a kernel, in pointers.
MOST_POINTERS = 500


class ChainError(ValueError):
    """Launches that cannot be chained."""


@dataclass(frozen=True)
class Phase:
    """A kernel of the chain, for one set of types, template values and threads."""

    op: str
    source: KernelSource
    signature: Signature
    threads: int


@dataclass(frozen=True)
class Chain:
    """``phases``: the different kernels; ``records`` int32 (launches, RECORD) says in which order
    and on what they run. ``inputs`` and ``outputs``: the arrays from and to outside; what is passed
    on lies in ``scratch`` bytes between the two."""

    phases: tuple[Phase, ...]
    records: tuple[tuple[int, ...], ...]
    inputs: tuple[mx.array, ...]
    outputs: tuple[mx.array, ...]
    scratch: int


def chain(launches: Sequence[Launch], results: Sequence[mx.array]) -> Chain:
    """The launches, which are in order, as one; ``results`` are those of their outputs that
    somebody reads afterwards.

    Raises ChainError for what a chain does not have: grids of more than one dimension of threads,
    too many arrays or shapes in a kernel, operations between the launches, and an input that is
    read before it is waited for.
    """
    made: set[int] = set()
    just_made: set[int] = set()
    outside = {id(array): array for array in results}
    inputs: dict[int, mx.array] = {}
    for launch in launches:
        given = [array for array in launch.inputs.values() if id(array) not in made]
        if made and len(given) == len(launch.inputs):
            raise ChainError(f"{launch.op} takes nothing that a launch before it has made")
        if any(id(launch.inputs.get(name)) in just_made for name in READ_EARLY):
            raise ChainError(f"{launch.op} reads too early what the launch before it makes")
        inputs.update((id(array), array) for array in given)
        just_made = {id(array) for array in launch.outputs.values()}
        made |= just_made
    places = {key: number for number, key in enumerate([*inputs, *outside])}
    if len(places) > MOST_POINTERS:
        raise ChainError(f"{len(places)} arrays are more than a kernel takes")
    scratch = 0
    for launch in launches:
        for array in launch.outputs.values():
            if id(array) not in outside:
                places[id(array)] = ~(scratch // REGION)
                scratch += -(-array.nbytes // REGION) * REGION
    phases: dict[Phase, int] = {}
    records = []
    for launch in launches:
        phase = _phase(launch)
        number = phases.setdefault(phase, len(phases))
        records.append(_record(number, launch, phase.signature, places))
    return Chain(
        tuple(phases), tuple(records), tuple(inputs.values()), tuple(outside.values()), scratch
    )


def _phase(launch: Launch) -> Phase:
    if launch.threadgroup[1:] != (1, 1):
        raise ChainError(f"{launch.op}: threadgroups of {launch.threadgroup}")
    source = kernel_source(launch.op, cuda=True)
    # Shapes are read out of the records: the text must not depend on them.
    signature = kernel_signature.build(
        launch.op,
        source.inputs,
        [_type(launch.inputs[name]) for name in source.inputs],
        source.outputs,
        [metal_type(array.dtype) for array in launch.outputs.values()],
        source.source,
        [(name, launch.template[name]) for name in source.template],
    )
    return Phase(launch.op, source, signature, launch.threadgroup[0])


def _type(array: mx.array) -> ArrayType:
    """The type of an array whose length, unless it is a small one, does not matter."""
    small = array.size < kernel_signature.SMALLEST_DEVICE_INPUT
    return ArrayType(metal_type(array.dtype), tuple(array.shape) if small else (1 << 20,))


def _record(
    number: int, launch: Launch, signature: Signature, places: Mapping[int, int]
) -> tuple[int, ...]:
    record = [0] * RECORD
    tiles = [size // of for size, of in zip(launch.grid, launch.threadgroup, strict=True)]
    record[:POINTERS] = [number, *tiles]
    arrays = {**launch.inputs, **launch.outputs}
    pointers = [p for p in signature.buffers if p.role in ("input", "output")]
    facts = [p for p in signature.buffers if p.role not in ("input", "output")]
    if len(pointers) > SHAPES - POINTERS or len(facts) > (RECORD - SHAPES) // SHAPE_SIZE:
        raise ChainError(f"{launch.op}: more arrays or shapes of them than a record has")
    for i, parameter in enumerate(pointers):
        record[POINTERS + i] = places[id(arrays[parameter.name])]
    for i, parameter in enumerate(facts):
        shape = launch.inputs[parameter.array].shape
        if parameter.role != "shape" or len(shape) > SHAPE_SIZE:
            raise ChainError(f"{launch.op}: {parameter.name} has no place in a record")
        start = SHAPES + i * SHAPE_SIZE
        record[start : start + len(shape)] = shape
    return tuple(record)
