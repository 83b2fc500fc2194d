"""The GGUF container: metadata, the tensor table, and each tensor's rows of raw bytes.

Only the header is parsed; tensor bytes stay in the memory-mapped file until they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from husky_mlx.errors import CheckpointError

# id: (name, elements per block, bytes per block)
BLOCK_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}
# Named so that a refusal can say which type it met.
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
           11: "<i8", 12: "<f8"}  # fmt: skip
STRING, ARRAY = 8, 9
SMALLEST_ENTRY = 12  # bytes: any metadata or tensor entry is longer than this


@dataclass(frozen=True)
class Tensor:
    """One row of the tensor table. ``shape`` is in row-major order, the last axis contiguous."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int

    @property
    def supported(self) -> bool:
        return self.type_id in BLOCK_TYPES

    @property
    def type_name(self) -> str:
        if self.supported:
            return BLOCK_TYPES[self.type_id][0]
        return OTHER_TYPES.get(self.type_id, f"type {self.type_id}")

    @property
    def row_bytes(self) -> int:
        _, elements, size = BLOCK_TYPES[self.type_id]
        return self.shape[-1] // elements * size

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """A GGUF file's ``metadata`` (key -> str, int, float, bool, list of str, or numpy array) and
    ``tensors`` (name -> Tensor). CheckpointError if the file is damaged or cut short."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as GGUF: {error}") from error
        self._position = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: damaged or truncated GGUF header near byte {self._position}: {error}"
            ) from error

    def rows(self, tensor: Tensor) -> np.ndarray:
        """The tensor's bytes as uint8 (rows, bytes per row); a 1-D tensor is rows of one element.

        The array is a read-only view of the mapped file.
        """
        _, elements, size = BLOCK_TYPES[tensor.type_id]
        columns = size if len(tensor.shape) == elements == 1 else tensor.row_bytes
        flat = np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.start)
        return flat.reshape(-1, columns)

    def _read_header(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file: it starts with {magic!r}")
        version = self._scalar("<u4")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version {version}; 2 and 3 are supported")
        tensor_count, entry_count = self._scalar("<u8"), self._scalar("<u8")
        self._check_count(tensor_count + entry_count, SMALLEST_ENTRY)
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<u4"))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {
            name: self._checked(Tensor(name, shape, type_id, data_start + offset))
            for name, shape, type_id, offset in entries
        }
        if len(self.tensors) != tensor_count:
            raise CheckpointError(f"{self.path}: a tensor name appears twice in the table")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("<u4")
        self._check_count(dimensions, 8)
        shape = tuple(self._scalar("<u8") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("<u4"), self._scalar("<u8")

    def _checked(self, tensor: Tensor) -> Tensor:
        if not tensor.shape or 0 in tensor.shape:
            raise CheckpointError(f"{self.path}: tensor {tensor.name} has shape {tensor.shape}")
        if not tensor.supported:
            return tensor
        name, elements, _ = BLOCK_TYPES[tensor.type_id]
        if tensor.shape[-1] % elements:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} of type {name} has rows of "
                f"{tensor.shape[-1]} elements; a multiple of {elements} was expected"
            )
        end = tensor.start + tensor.nbytes
        if end > len(self._bytes):
            raise CheckpointError(
                f"{self.path}: truncated: tensor {tensor.name} ends at byte {end:,}, "
                f"the file has {len(self._bytes):,}"
            )
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        raise struct.error(f"unknown metadata type {kind}")

    def _array(self) -> Any:
        kind, count = self._scalar("<u4"), self._scalar("<u8")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            self._check_count(count, dtype.itemsize)
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind != STRING:
            raise struct.error(f"an array of metadata type {kind}")
        self._check_count(count, 8)
        return [self._string() for _ in range(count)]

    def _scalar(self, dtype: str) -> Any:
        value = np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0]
        # A float32 becomes the shortest decimal that it stands for: 1e-05, not 9.99999974e-06.
        return float(str(value)) if dtype == "<f4" else value.item()

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._bytes, self._position)
        self._position += 8
        return self._take(length).decode()

    def _take(self, count: int) -> bytes:
        piece = self._bytes[self._position : self._position + count]
        if len(piece) != count:
            raise struct.error(f"{count} bytes expected, {len(piece)} left")
        self._position += count
        return piece

    def _check_count(self, count: int, size: int) -> None:
        if count * size > len(self._bytes) - self._position:
            raise struct.error(f"{count} entries announced, too many for the file")
