"""A model's native program in this process: addresses in, logits out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from husky_mlx.config import LlamaConfig
from husky_mlx.native import compiler
from husky_mlx.native.buffers import Buffers, Rows
from husky_mlx.native.cores import available_cores
from husky_mlx.native.emit import block_tokens, emit
from husky_mlx.native.errors import NativeError
from husky_mlx.native.library import library
from husky_mlx.native.storage import arrays_in_order, memory_of, model_format

_MOST_THREADS = 256  # pool.h's

_FAILURES = {
    1: "the program refused a call: a token outside the vocabulary, or rows outside the buffers",
    2: "the system gave the program no threads",
    3: "the system gave the program no memory",
}


# The fields of forward.h's Call, in its order.
class _Call(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("position", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("wanted", ctypes.c_int32),
    )


class Program:
    """The compiled forward of one model, one sequence at a time.

    It reads the weights where MLX has them and keeps them alive; weights that are replaced in the
    model later are not seen. Calls from several threads run one after the other, also those of
    other programs of the same shape; a forked process starts its own threads.
    """

    def __init__(
        self,
        path: Path,
        config: LlamaConfig,
        arrays: Sequence[mx.array | None],
        kv_dtype: mx.Dtype,
        threads: int | None = None,
    ):
        """``arrays``: all tensors in the order of ``storage.arrays_in_order``, evaluated."""
        self.path = path
        self.config = config
        self.kv_dtype = kv_dtype
        self.threads = min(threads or available_cores(), _MOST_THREADS)
        self.block = block_tokens(config)
        self._forward = _library(path).husky_forward
        # Of handles: who changes a weight in place must neither free nor write what is read here.
        self._memory = [None if array is None else memory_of(array[...]) for array in arrays]
        self._addresses = np.array(
            [0 if memory is None else memory.ctypes.data for memory in self._memory], np.uint64
        )
        self._windows = [config.window_of(i) for i in range(config.num_hidden_layers)]

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        kv_dtype: mx.Dtype = mx.float32,
        exact: bool = False,
        threads: int | None = None,
    ) -> Program:
        """Compile or find the program of a model; evaluates its weights.

        ``exact``: activations stay floats where they meet quantised weights, for parity tests.
        ``threads``: all cores that this process may use unless given. NativeError says why there
        is none: tensors that it does not take, or no compiler.
        """
        config = model.args
        # What is compiled for these takes no others, which another thread may assign meanwhile.
        formats, arrays = model_format(model), arrays_in_order(model)
        path = library(emit(config, formats, kv_dtype, exact), compiler.find())
        mx.eval([array for array in arrays if array is not None])
        return cls(path, config, arrays, kv_dtype, threads)

    def buffers(
        self, pairs: Sequence[tuple[mx.array, mx.array]], *, sequence: int = 0, skip: int = 0
    ) -> Buffers:
        """Each layer's keys and values, (B, kv_heads, capacity, head_dim) of ``kv_dtype``.

        Those of one ``sequence`` of the batch, without its first ``skip`` rows: row 0 is the next.
        The program writes into their memory: nobody else may rely on what it holds.
        """
        heads = (self.config.num_key_value_heads, self.config.head_dim)
        return Buffers(pairs, heads, self.kv_dtype, self._windows, sequence, skip)

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray,
        buffers: Buffers,
        position: int = 0,
        *,
        row: int | None = None,
        wanted: str = "last",
    ) -> mx.array | None:
        """Append tokens, the first one at ``position`` of the sequence and in ``row``, which is the
        same unless given; the rows before it are those of the tokens before, in order.

        ``wanted``: logits of the ``"last"`` token (1, vocabulary), of ``"all"`` (L, vocabulary), or
        ``"none"``; or ``"hidden"``, what the head would multiply (L, hidden). They are float32 and
        evaluated. A long call runs in blocks, between which Python sees signals. ValueError for
        tokens or rows out of range.
        """
        ids = np.ascontiguousarray(tokens, np.int32)
        row = position if row is None else row
        hidden = wanted == "hidden"
        count = {"all": len(ids), "hidden": len(ids), "last": 1, "none": 0}[wanted]
        columns = self.config.hidden_size if hidden else self.config.vocab_size
        results = _evaluated_zeros(count, columns) if count else None
        out = None if results is None else memory_of(results)
        for start in range(0, len(ids), self.block):
            block = ids[start : start + self.block]
            end = start + len(block)
            buffers.place(row + start, row + end)
            part = out if end == len(ids) else None
            if count > 1 and out is not None:
                part = out[start:end]
            self._call(block, buffers, position + start, part, hidden)
        return results

    def decode(
        self,
        token: int,
        buffers: Buffers,
        position: int,
        *,
        row: Rows | None = None,
        live: Rows | None = None,
    ) -> mx.array:
        """Append one token: logits (1, vocabulary).

        It goes into ``row`` and sees the rows below ``live``, each one number or one a layer;
        ``position`` and the rows up to it unless given. In a ring of at most the window's rows they
        may be in any order.
        """
        return mx.array(self._decode(token, buffers, position, row, live))

    def greedy(
        self,
        token: int,
        buffers: Buffers,
        position: int,
        *,
        row: Rows | None = None,
        live: Rows | None = None,
    ) -> int:
        """As ``decode``: the most likely next token."""
        return int(self._decode(token, buffers, position, row, live).argmax())

    def _decode(
        self, token: int, buffers: Buffers, position: int, row: Rows | None, live: Rows | None
    ) -> np.ndarray:
        buffers.place(
            position if row is None else row,
            position + 1 if live is None else live,
        )
        out = np.empty((1, self.config.vocab_size), np.float32)
        self._call(np.array([token], np.int32), buffers, position, out)
        return out

    def _call(
        self,
        tokens: np.ndarray,
        buffers: Buffers,
        position: int,
        out: np.ndarray | None,
        hidden: bool = False,
    ) -> None:
        address = None if out is None else out.ctypes.data
        call = _Call(
            self._addresses.ctypes.data,
            buffers.address,
            tokens.ctypes.data,
            None if hidden else address,
            address if hidden else None,
            position,
            len(tokens),
            0 if out is None else len(out),
        )
        result = self._forward(ctypes.byref(call), self.threads)
        if result == 1:
            raise ValueError(_FAILURES[1])
        if result:
            raise NativeError([_FAILURES[result]])


def _evaluated_zeros(rows: int, columns: int) -> mx.array:
    zeros = mx.zeros((rows, columns), mx.float32)
    mx.eval(zeros)
    return zeros


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError([f"{path} cannot be loaded: {error}"]) from error
    loaded.husky_forward.argtypes = (ctypes.c_void_p, ctypes.c_int)
    loaded.husky_forward.restype = ctypes.c_int
    return loaded
