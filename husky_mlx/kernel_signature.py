"""What MLX makes of a kernel body: its parameters, and the Metal function that it wraps around it.

``Signature.metal`` is the text that ``mx.fast.metal_kernel`` compiles (after its own library of
helpers); a test compares it with what MLX prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# In the order in which MLX appends them to the parameters.
THREAD_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
# Those that the emulator and the CUDA prelude have too.
PORTABLE_ATTRIBUTES = frozenset(
    {
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
    }
)

METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
}
# MLX passes an input with fewer elements in the constant address space.
SMALLEST_DEVICE_INPUT = 8


def dtype_name(dtype: object) -> str:
    """``float16`` for ``mx.float16``, ``np.float16`` or ``np.dtype("float16")``."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).rsplit(".", 1)[-1]


def metal_type(dtype: object) -> str:
    """The Metal name of an MLX or numpy dtype. Raises ValueError for one that kernels refuse."""
    name = dtype_name(dtype)
    if name not in METAL_TYPES:
        raise ValueError(f"dtype {name}: kernels take {', '.join(METAL_TYPES)}")
    return METAL_TYPES[name]


@dataclass(frozen=True)
class ArrayType:
    """An input or output as its signature sees it: the Metal element type and the shape."""

    element: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product


@dataclass(frozen=True)
class Parameter:
    """One parameter of the Metal function.

    ``role`` is ``input``, ``output``, ``attribute``, or for the facts about an input that MLX adds
    when the body names them ``shape``, ``strides``, ``ndim``; ``array`` is the input's name then.
    """

    name: str
    role: str
    element: str
    address_space: str = ""
    declarator: str = ""
    array: str = ""

    @property
    def declaration(self) -> str:
        if self.role == "attribute":
            return f"{self.element} {self.name}"
        const = "" if self.role == "output" else "const "
        return f"{const}{self.address_space} {self.element}{self.declarator} {self.name}"


@dataclass(frozen=True)
class Signature:
    """The parameters of a kernel for one set of input and output types and template values.

    ``template``: (name, kind, value as text), kind being ``typename``, ``int`` or ``bool``.
    """

    function: str
    parameters: tuple[Parameter, ...]
    template: tuple[tuple[str, str, str], ...]

    @property
    def buffers(self) -> list[Parameter]:
        """The parameters that are memory, in order."""
        return [p for p in self.parameters if p.role != "attribute"]

    @property
    def template_declaration(self) -> str:
        """``template <typename T, int N>`` with its line end, or nothing."""
        if not self.template:
            return ""
        return f"template <{', '.join(f'{kind} {name}' for name, kind, _ in self.template)}>\n"

    @property
    def template_values(self) -> str:
        """``<float, 4>``, or nothing."""
        return f"<{', '.join(value for _, _, value in self.template)}>" if self.template else ""

    def metal(self, header: str, source: str) -> str:
        """The Metal text that MLX compiles, after its own helpers."""
        lines = []
        for index, parameter in enumerate(self.parameters):
            attribute = parameter.role == "attribute"
            binding = parameter.name if attribute else f"buffer({index})"
            lines.append(f"  {parameter.declaration} [[{binding}]]")
        instance = f"{self.function}{self.template_values}"
        return (
            f"{header}{self.template_declaration}[[kernel]] void {self.function}(\n"
            + ",\n".join(lines)
            + f") {{\n{source}\n}}\n"
            + (
                f'\ntemplate [[host_name("{self.function}")]] [[kernel]] '
                f"decltype({instance}) {instance};\n"
                if self.template
                else ""
            )
        )


def template_value(value: object) -> tuple[str, str]:
    """(kind, text) of a template argument: an int, a bool or a dtype."""
    if isinstance(value, bool):
        return "bool", "1" if value else "0"
    if isinstance(value, int):
        return "int", str(value)
    return "typename", metal_type(value)


def build(
    name: str,
    input_names: Sequence[str],
    inputs: Sequence[ArrayType],
    output_names: Sequence[str],
    output_elements: Sequence[str],
    source: str,
    template: Sequence[tuple[str, object]] = (),
) -> Signature:
    """The signature that MLX gives this kernel.

    ``_shape``, ``_strides``, ``_ndim`` and the thread attributes are found by substring in
    ``source``, comments included, as MLX does.
    """
    parameters: list[Parameter] = []
    for input_name, array in zip(input_names, inputs, strict=True):
        space = "constant" if array.size < SMALLEST_DEVICE_INPUT else "device"
        declarator = "*" if array.shape else "&"
        parameters.append(Parameter(input_name, "input", array.element, space, declarator))
        for role, element, how in (
            ("shape", "int", "*"),
            ("strides", "int64_t", "*"),
            ("ndim", "int", "&"),
        ):
            fact = f"{input_name}_{role}"
            if array.shape and fact in source:
                parameters.append(Parameter(fact, role, element, "constant", how, input_name))
    for output_name, element in zip(output_names, output_elements, strict=True):
        parameters.append(Parameter(output_name, "output", element, "device", "*"))
    for attribute, element in THREAD_ATTRIBUTES.items():
        if attribute in source:
            parameters.append(Parameter(attribute, "attribute", element))

    arguments = tuple((key, *template_value(value)) for key, value in template)
    function = f"custom_kernel_{name}"
    if arguments:
        function += "__" + "_".join(text for _, _, text in arguments)
    for array in inputs:
        kind = "s" if not array.shape else "c" if array.size < SMALLEST_DEVICE_INPUT else ""
        function += f"_{array.element}{kind}"
    function += "".join(f"_{element}" for element in output_elements)
    return Signature(function, tuple(parameters), arguments)
