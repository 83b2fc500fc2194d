"""A chain of kernels as the text of one CUDA kernel; ``metal_kernels/prelude/chain.h`` runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from husky_mlx.chain import RECORD, Chain, ChainError, Phase
from husky_mlx.cuda_source import (
    CudaSource,
    device_header,
    parameter_declaration,
    without_address_spaces,
)
from husky_mlx.kernel_signature import Parameter, Signature
from husky_mlx.metal_text import (
    kernel_folder,
    replace_threadgroup_arrays,
    with_float_literals,
    without_comments,
)
from husky_mlx.paths import cache_dir, write_whole

BLOCK_THREADS = 512
# What the barrier of the grid has in shared memory of its own, at most: chain.h.
STATE_BYTES = 5 * 1024

_ATTRIBUTES = {
    "threadgroup_position_in_grid": "position",
    "threadgroups_per_grid": "grid",
    "threads_per_grid": "uint3(grid.x * HUSKY_COUNT, grid.y, grid.z)",
    "thread_index_in_threadgroup": "thread",
    "simdgroup_index_in_threadgroup": "thread / 32",
    "thread_index_in_simdgroup": "thread % 32",
    "thread_position_in_grid": "uint3(position.x * HUSKY_COUNT + thread, position.y, position.z)",
}
_NAMESPACE = "husky_chain"


@dataclass(frozen=True)
class ChainSource:
    """The kernel's text as ``CudaSource``, and the bytes of shared memory of a launch."""

    source: CudaSource
    shared_memory: int


def translate_chain(made: Chain, signature: Signature, memory: int) -> ChainSource:
    """Writes the chain's file to the cache unless it is there.

    ``signature``: of the whole kernel, whose inputs are the chain's, then a turn, the records and
    the counter, and whose outputs are the chain's, then an order, a turn and the scratch.
    ``memory``: bytes of shared memory that a block may have. Raises ChainError for a kernel that
    names what a chain does not have, and for more launches than a block's memory holds.
    """
    records = 4 * RECORD * len(made.records)
    pointers = 8 * (len(made.inputs) + len(made.outputs))
    tables = -(-(records + pointers) // 16) * 16
    arena = memory - STATE_BYTES - tables
    if arena <= 0:
        raise ChainError(f"{len(made.records)} launches do not fit a block's memory")
    text = _file_text(made, arena)
    name = f"chain_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    file = cache_dir() / "cuda" / f"{name}.h"
    if not file.exists():
        write_whole(file, text.replace(_NAMESPACE, name).encode())
    # Pointers to const and others in one list.
    arrays = ", ".join(f"(const void*){parameter.name}" for parameter in signature.buffers)
    call = f"  const void* arrays[] = {{{arrays}}};\n  ::metal::{name}::run_all(arrays);\n"
    return ChainSource(CudaSource(f'#include "{file}"\n', call, file), tables + arena)


def _file_text(made: Chain, arena: int) -> str:
    phases = made.phases
    cases = "\n".join(f"      case {i}: phase_{i}::run(arrays); break;" for i in range(len(phases)))
    inputs, outputs = len(made.inputs), len(made.outputs)
    return (
        f'#pragma once\n#include "{kernel_folder() / "prelude_cuda.h"}"\n'
        f'#include "{kernel_folder() / "prelude" / "chain.h"}"\n'
        "#undef MSL_INPUTS_READY\n#undef MSL_SHARED_ASM\n#define MSL_SHARED_ASM asm volatile\n"
        f"#define MSL_INPUTS_READY() ::metal::chain::ready<HUSKY_COUNT>()\n"
        "#define threadgroup_barrier(flags) ::metal::chain::part_barrier<HUSKY_COUNT>()\n"
        f"namespace metal {{ namespace {_NAMESPACE} {{\n"
        f"{''.join(_phase(i, phase, arena) for i, phase in enumerate(phases))}"
        f"""
constexpr int RECORDS = {len(made.records)};
constexpr int INPUTS = {inputs};
constexpr int OUTPUTS = {outputs};

// arrays: the chain's inputs, a turn, records, counter, the chain's outputs, order, turn, scratch.
HUSKY_FUNC void run_all(const void* const* arrays_given) {{
  extern __shared__ uint4 husky_shared[];
  int* records = reinterpret_cast<int*>(husky_shared);
  const void** pointers = reinterpret_cast<const void**>(records + chain::RECORD * RECORDS);
  char* arena = reinterpret_cast<char*>(husky_shared) +
                (size_t(RECORDS) * chain::RECORD * 4 + (INPUTS + OUTPUTS) * 8 + 15) / 16 * 16;
  const int4* given = reinterpret_cast<const int4*>(arrays_given[INPUTS + 1]);
  for (int i = threadIdx.x; i < RECORDS * chain::RECORD / 4; i += chain::THREADS) {{
    reinterpret_cast<int4*>(records)[i] = given[i];
  }}
  if (threadIdx.x == 0) {{
#pragma unroll
    for (int i = 0; i < INPUTS; i++) {{
      pointers[i] = arrays_given[i];
    }}
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {{
      pointers[INPUTS + i] = arrays_given[INPUTS + 3 + i];
    }}
  }}
  chain::begin(
      reinterpret_cast<unsigned long long*>(const_cast<void*>(arrays_given[INPUTS + 2])));
  __syncthreads();
  char* scratch =
      reinterpret_cast<char*>(const_cast<void*>(arrays_given[INPUTS + 5 + OUTPUTS]));
#pragma unroll 1
  for (int number = 0; number < RECORDS; number++) {{
    const chain::Arrays arrays = {{records + number * chain::RECORD, pointers, scratch, arena}};
    switch (arrays.record[0]) {{
{cases}
    }}
    if (number + 1 < RECORDS) {{
      chain::arrive();
    }}
  }}
}}
"""
        "} }\n#undef threadgroup_barrier\n"
    )


def _phase(number: int, phase: Phase, arena: int) -> str:
    if phase.threads > BLOCK_THREADS:
        raise ChainError(f"{phase.op}: threadgroups of {phase.threads} threads")
    declared: list[str] = []

    def declare(element: str, name: str, dimensions: str, index: int) -> str:
        start = f"HUSKY_END_{index - 1}" if index else "0"
        declared.append(name)
        return (
            f"typedef {element} husky_array_{index}{dimensions}; "
            f"husky_array_{index}& {name} = "
            f"*reinterpret_cast<husky_array_{index}*>(husky_arena + {start}); "
            f"constexpr size_t HUSKY_END_{index} = "
            f"{start} + (sizeof(husky_array_{index}) + 15) / 16 * 16;"
        )

    source = phase.source
    body = replace_threadgroup_arrays(with_float_literals(without_comments(source.source)), declare)
    end = f"HUSKY_END_{len(declared) - 1}" if declared else "size_t(0)"
    parameters = ", ".join(parameter_declaration(p) for p in phase.signature.parameters)
    values = ", ".join(value for _, _, value in phase.signature.template)
    pointers = [p for p in phase.signature.buffers if p.role in ("input", "output")]
    shapes = [p for p in phase.signature.buffers if p.role == "shape"]
    arguments = ", ".join(
        _argument(p, pointers, shapes, phase.op) for p in phase.signature.parameters
    )
    # Products and attention wait by themselves, once what they need not wait for is on its way.
    by_itself = "MSL_INPUTS_READY" in source.header + source.source
    waits = "" if by_itself else "    chain::ready<HUSKY_COUNT>();\n"
    return (
        f"namespace phase_{number} {{  // {phase.op}\n"
        f"constexpr int HUSKY_COUNT = {phase.threads};\n"
        f"constexpr int PARTS = chain::parts_of<HUSKY_COUNT>();\n"
        f"constexpr size_t HUSKY_ARENA = {arena} / PARTS / 16 * 16;\n"
        f'#line 1 "{phase.op} header"\n{device_header(source.header)}\n'
        f"{phase.signature.template_declaration}"
        f"HUSKY_FUNC void body({parameters}, char* husky_arena) {{\n"
        f'#line 1 "{phase.op}"\n{without_address_spaces(body)}\n'
        f'static_assert({end} <= HUSKY_ARENA, "a phase needs more shared memory");\n}}\n'
        f"""
HUSKY_FUNC void run(const chain::Arrays& arrays) {{
  const int part = chain::thread_of_block() / HUSKY_COUNT;
  if (part >= PARTS) {{
    return;
  }}
  const uint3 grid(arrays.record[1], arrays.record[2], arrays.record[3]);
  const uint tiles = grid.x * grid.y * grid.z;
#pragma unroll 1
  for (uint tile = part * gridDim.x + blockIdx.x; tile < tiles; tile += PARTS * gridDim.x) {{
{waits}    const uint thread = chain::thread_of_block() % HUSKY_COUNT;
    const uint3 position(tile % grid.x, tile / grid.x % grid.y, tile / (grid.x * grid.y));
    body{f"<{values}>" if values else ""}({arguments}, arrays.arena + part * HUSKY_ARENA);
    chain::part_barrier<HUSKY_COUNT>();
  }}
  chain::ready<HUSKY_COUNT>();
}}
}}
"""
    )


def _argument(
    parameter: Parameter, pointers: Sequence[Parameter], shapes: Sequence[Parameter], op: str
) -> str:
    if parameter.role == "attribute":
        if parameter.name not in _ATTRIBUTES:
            raise ChainError(f"{op} names {parameter.name}")
        return _ATTRIBUTES[parameter.name]
    if parameter.role == "shape":
        return f"arrays.shape({shapes.index(parameter)})"
    const = "const " if parameter.role == "input" else ""
    value = f"arrays.at<{const}{parameter.element}>({pointers.index(parameter)})"
    return f"*{value}" if parameter.declarator == "&" else value
