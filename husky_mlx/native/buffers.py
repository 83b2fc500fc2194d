"""The KV buffers of a sequence as the native program takes them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from husky_mlx.native.storage import memory_of

# forward.h's CacheRows.
_ROWS = np.dtype(
    [
        ("keys", np.uint64),
        ("values", np.uint64),
        ("capacity", np.int64),
        ("slot", np.int64),
        ("live", np.int64),
        ("window", np.int64),
    ]
)
_ALL = 2**31 - 1

Rows = int | Sequence[int]  # of every layer, or one a layer


class Buffers:
    """Every layer's keys and values; made anew when one of them is replaced."""

    def __init__(
        self,
        pairs: Sequence[tuple[mx.array, mx.array]],
        heads: tuple[int, int],
        dtype: mx.Dtype,
        windows: Sequence[int | None],
        sequence: int = 0,
        skip: int = 0,
    ):
        """``heads``: number of key/value heads and elements of one. ``windows``: one a layer.
        ``sequence``, ``skip``: which of a batch, and how many of its rows come before row 0.

        Evaluates the arrays. ValueError for a wrong shape, dtype, number of layers or sequence.
        """
        if len(pairs) != len(windows):
            raise ValueError(f"{len(pairs)} layers of KV buffers for {len(windows)} layers")
        mx.eval([array for pair in pairs for array in pair])
        for array in (array for pair in pairs for array in pair):
            batch, kv_heads, capacity, head_dim = array.shape
            fits = 0 <= sequence < batch and 0 <= skip <= capacity
            if not fits or (kv_heads, head_dim, array.dtype) != (*heads, dtype):
                raise ValueError(
                    f"a KV buffer should be {dtype} of shape (more than {sequence}, {heads[0]}, "
                    f"at least {skip}, {heads[1]}), found {array.dtype} of {array.shape}"
                )
        self._memory = [(memory_of(keys), memory_of(values)) for keys, values in pairs]
        self._rows = np.zeros(len(pairs), _ROWS)
        for row, (keys, values) in zip(self._rows, self._memory, strict=True):
            if keys.shape != values.shape:
                raise ValueError(f"keys of shape {keys.shape} beside values of {values.shape}")
            # Rows of a head lie together and heads ``capacity`` rows apart, wherever row 0 is.
            start = sequence * keys.strides[0] + skip * keys.strides[2]
            row["keys"], row["values"] = keys.ctypes.data + start, values.ctypes.data + start
            row["capacity"] = keys.shape[2]
        self._rows["window"] = [_ALL if window is None else window for window in windows]
        self.address = self._rows.ctypes.data

    def place(self, slot: Rows, live: Rows) -> None:
        """Say where the next call's first token goes and how many rows its last token may see."""
        self._rows["slot"] = slot
        self._rows["live"] = live
