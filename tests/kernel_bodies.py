"""Small kernels in Metal with what they must give, in float64, for the emulator and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Of the largest output: one rounding to the type, and float32's own sums.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 4.5e-3}


@dataclass
class Case:
    """A kernel, one call of it, and the outputs (and updated inputs) that the call must give."""

    name: str
    input_names: list[str]
    output_names: list[str]
    source: str
    call: dict[str, Any]
    expected: list[np.ndarray]
    updated: dict[str, np.ndarray] = field(default_factory=dict)
    header: str = ""

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments of ``metal_kernel``."""
        return {
            "name": self.name,
            "input_names": self.input_names,
            "output_names": self.output_names,
            "source": self.source,
            "header": self.header,
        }

    def edited(self, old: str, new: str, **call: Any) -> Case:
        """The case with a piece of its body or header replaced, and other arguments."""
        assert (self.source + self.header).count(old) == 1, f"{self.name}: {old!r}"
        return replace(
            self,
            source=self.source.replace(old, new),
            header=self.header.replace(old, new),
            call={**self.call, **call},
        )

    def line_of(self, piece: str) -> int:
        """The line of the body on which ``piece`` stands."""
        assert self.source.count(piece) == 1, f"{self.name}: {piece!r}"
        return self.source[: self.source.index(piece)].count("\n") + 1


def random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0, scale: float = 1.0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    """The values as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def swiglu(dtype: mx.Dtype) -> Case:
    """Element by element, four at a time, with a helper and a table in the header."""
    gate, up = random((256,), dtype), random((256,), dtype, seed=1)
    g, u = exact(gate), exact(up)
    scale = np.tile([1.0, 0.5], 128)
    return Case(
        "swiglu",
        ["gate", "up"],
        ["out"],
        """
const uint i = thread_position_in_grid.x;
const float4 g = float4(((const device vec<T, 4>*)gate)[i]);
const float4 u = float4(((const device vec<T, 4>*)up)[i]);
float4 y = g * u;
for (int k = 0; k < 4; k++) {
  y[k] *= SCALE[k] * sigmoid(g[k]);
}
((device vec<T, 4>*)out)[i] = vec<T, 4>(y);
""",
        {
            "inputs": [gate, up],
            "template": [("T", dtype)],
            "grid": (64, 1, 1),
            "threadgroup": (32, 1, 1),
            "output_shapes": [(256,)],
            "output_dtypes": [dtype],
        },
        [g * u * scale / (1 + np.exp(-g))],
        header="""
constant float SCALE[4] = {1.0f, 0.5f, 1.0f, 0.5f};
template <typename U>
inline U sigmoid(U x) { return U(1.0f / (1.0f + metal::exp(-float(x)))); }
""",
    )


def row_sum(dtype: mx.Dtype) -> Case:
    """One simdgroup a row; two rows a threadgroup."""
    x = random((6, 80), dtype)
    return Case(
        "row_sum",
        ["x"],
        ["out"],
        """
const uint row = thread_position_in_grid.x / 32;
const uint lane = thread_index_in_simdgroup;
float sum = 0.0f;
for (int i = lane; i < x_shape[1]; i += 32) {
  sum += float(x[row * x_shape[1] + i]);
}
sum = simd_sum(sum);
if (lane == 0) {
  out[row] = sum;
}
""",
        {
            "inputs": [x],
            "template": [],
            "grid": (192, 1, 1),
            "threadgroup": (64, 1, 1),
            "output_shapes": [(6,)],
            "output_dtypes": [mx.float32],
        },
        [exact(x).sum(1)],
    )


def rms_norm(dtype: mx.Dtype) -> Case:
    """One threadgroup a row: simdgroups meet in threadgroup memory, at a barrier."""
    x, weight = random((4, 256), dtype), random((256,), dtype, seed=1)
    eps = mx.array([1e-3], mx.float32)
    rows = exact(x)
    return Case(
        "rms_norm",
        ["x", "weight", "eps"],
        ["out"],
        """
const uint row = threadgroup_position_in_grid.x;
const uint t = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
threadgroup float partial[4];
const float a = float(x[row * 256 + t]);
const float b = float(x[row * 256 + t + 128]);
const float squares = simd_sum(a * a + b * b);
if (lane == 0) {
  partial[simdgroup] = squares;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const float total = simd_sum(lane < 4 ? partial[lane] : 0.0f);
const float r = metal::precise::rsqrt(total / 256 + float(eps[0]));
out[row * 256 + t] = T(a * r * float(weight[t]));
out[row * 256 + t + 128] = T(b * r * float(weight[t + 128]));
""",
        {
            "inputs": [x, weight, eps],
            "template": [("T", dtype)],
            "grid": (512, 1, 1),
            "threadgroup": (128, 1, 1),
            "output_shapes": [(4, 256)],
            "output_dtypes": [dtype],
        },
        [rows / np.sqrt((rows**2).mean(1, keepdims=True) + 1e-3) * exact(weight)],
    )


def gemv_4bit(dtype: mx.Dtype) -> Case:
    """MLX's affine 4-bit layout, groups of 64, two rows a simdgroup."""
    dense = random((16, 256), mx.float32, scale=0.5)
    weight, scales, biases = mx.quantize(dense, group_size=64, bits=4)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    x = random((256,), dtype, seed=1)
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    rows = exact(mx.dequantize(weight, *wide, group_size=64, bits=4))
    return Case(
        "gemv_4bit",
        ["weight", "scales", "biases", "x"],
        ["out"],
        """
const uint lane = thread_index_in_simdgroup;
const uint first = (thread_position_in_grid.x / 32) * ROWS;
float sums[ROWS];
for (int r = 0; r < ROWS; r++) {
  sums[r] = 0.0f;
  const uint word = weight[(first + r) * 32 + lane];
  const uint group = (first + r) * 4 + lane / 8;
  const float scale = float(scales[group]);
  const float bias = float(biases[group]);
  for (int k = 0; k < 8; k++) {
    const float value = scale * float((word >> (4 * k)) & 15u) + bias;
    sums[r] += value * float(x[lane * 8 + k]);
  }
}
for (int r = 0; r < ROWS; r++) {
  const float sum = simd_sum(sums[r]);
  if (lane == 0) {
    out[first + r] = T(sum);
  }
}
""",
        {
            "inputs": [weight, scales, biases, x],
            "template": [("T", dtype), ("ROWS", 2)],
            "grid": (256, 1, 1),
            "threadgroup": (64, 1, 1),
            "output_shapes": [(16,)],
            "output_dtypes": [dtype],
        },
        [rows @ exact(x)],
    )


def attention(dtype: mx.Dtype) -> Case:
    """Decode attention: a threadgroup a head, its simdgroups share the context by turns."""
    queries = random((4, 64), dtype)
    keys, values = random((2, 48, 64), dtype, seed=1), random((2, 48, 64), dtype, seed=2)
    live = mx.array([37], mx.int32)
    q, k, v = exact(queries), exact(keys)[:, :37], exact(values)[:, :37]
    scores = np.einsum("hd,htd->ht", q, k.repeat(2, 0)) / 8
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return Case(
        "attention",
        ["queries", "keys", "values", "live"],
        ["out"],
        """
const uint head = threadgroup_position_in_grid.x;
const uint lane = thread_index_in_simdgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const size_t context = size_t(head / GROUPED) * keys_shape[1];
threadgroup float merged_max[SIMDGROUPS];
threadgroup float merged_sum[SIMDGROUPS];
threadgroup float2 merged[SIMDGROUPS][32];
const float2 q = float2(((const device vec<T, 2>*)queries)[head * 32 + lane]) * 0.125f;
float2 acc = float2(0.0f);
float top = -INFINITY;
float sum = 0.0f;
for (int t = simdgroup; t < live[0]; t += SIMDGROUPS) {
  const device vec<T, 2>* k = (const device vec<T, 2>*)keys + (context + t) * 32;
  const device vec<T, 2>* v = (const device vec<T, 2>*)values + (context + t) * 32;
  const float score = simd_sum(dot(q, float2(k[lane])));
  const float raised = max(top, score);
  const float keep = metal::exp(top - raised);
  const float share = metal::exp(score - raised);
  acc = acc * keep + share * float2(v[lane]);
  sum = sum * keep + share;
  top = raised;
}
if (lane == 0) {
  merged_max[simdgroup] = top;
  merged_sum[simdgroup] = sum;
}
merged[simdgroup][lane] = acc;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup == 0) {
  float best = -INFINITY;
  for (int s = 0; s < SIMDGROUPS; s++) {
    best = max(best, merged_max[s]);
  }
  float2 result = float2(0.0f);
  float total = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    const float share = metal::exp(merged_max[s] - best);
    result += merged[s][lane] * share;
    total += merged_sum[s] * share;
  }
  ((device vec<T, 2>*)out)[head * 32 + lane] = vec<T, 2>(result / total);
}
""",
        {
            "inputs": [queries, keys, values, live],
            "template": [("T", dtype), ("GROUPED", 2), ("SIMDGROUPS", 4)],
            "grid": (512, 1, 1),
            "threadgroup": (128, 1, 1),
            "output_shapes": [(4, 64)],
            "output_dtypes": [dtype],
        },
        [np.einsum("ht,htd->hd", weights, v.repeat(2, 0))],
    )


def append(dtype: mx.Dtype) -> Case:
    """A row into a cache buffer that is an input, and a small output for the order."""
    row, cache = random((2, 32), dtype), random((2, 10, 32), dtype, seed=1)
    slot = mx.array([6], mx.int32)
    after = exact(cache)
    after[:, 6] = 2 * exact(row)
    return Case(
        "append",
        ["row", "cache", "slot"],
        ["written"],
        """
const uint head = threadgroup_position_in_grid.x;
const uint d = thread_index_in_threadgroup;
device T* target = mutable_input(cache);
target[(head * cache_shape[1] + slot[0]) * 32 + d] = T(float(row[head * 32 + d]) * 2.0f);
if (d == 0) {
  written[head] = slot[0] + 1;
}
""",
        {
            "inputs": [row, cache, slot],
            "template": [("T", dtype)],
            "grid": (64, 1, 1),
            "threadgroup": (32, 1, 1),
            "output_shapes": [(2,)],
            "output_dtypes": [mx.int32],
        },
        [np.array([7.0, 7.0])],
        updated={"cache": after},
    )


FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel);"


def handover(dtype: mx.Dtype) -> Case:
    """Each threadgroup writes a part, and the one that comes last sums what all have written."""
    x = random((5, 64), dtype)
    tickets = mx.arange(16, dtype=mx.uint32)
    return Case(
        "handover",
        ["x", "tickets"],
        ["out", "partials"],
        f"""
const uint part = threadgroup_position_in_grid.x;
const uint d = thread_index_in_threadgroup;
threadgroup uint before[1];
partials[part * 64 + d] = 2.0f * float(x[part * 64 + d]);
threadgroup_barrier(mem_flags::mem_device);
if (d == 0) {{
  device atomic_uint* ticket = reinterpret_cast<device atomic_uint*>(mutable_input(tickets));
  {FENCE}
  before[0] = atomic_fetch_add_explicit(ticket, 1u, memory_order_relaxed);
  {FENCE}
  if (before[0] == 4u) {{
    atomic_store_explicit(ticket, 0u, memory_order_relaxed);
  }}
}}
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
if (before[0] == 4u) {{
  float sum = 0.0f;
  for (int i = 0; i < 5; i++) {{
    sum += partials[i * 64 + d];
  }}
  out[d] = T(sum);
}}
""",
        {
            "inputs": [x, tickets],
            "template": [("T", dtype)],
            "grid": (320, 1, 1),
            "threadgroup": (64, 1, 1),
            "output_shapes": [(64,), (5, 64)],
            "output_dtypes": [dtype, mx.float32],
        },
        [2 * exact(x).sum(axis=0), 2 * exact(x)],
        updated={"tickets": np.arange(16.0)},
    )


BODIES = {
    "swiglu": swiglu,
    "row_sum": row_sum,
    "rms_norm": rms_norm,
    "gemv_4bit": gemv_4bit,
    "attention": attention,
    "append": append,
    "handover": handover,
}


def assert_close(found: mx.array, expected: np.ndarray, case: str) -> None:
    error = np.abs(exact(found) - expected).max() / np.abs(expected).max()
    tolerance = TOLERANCE.get(found.dtype, 0.0)
    assert error <= tolerance, f"{case}: {error:.1e} of the largest output, allowed {tolerance}"


def assert_right(case: Case, outputs: Any) -> None:
    """The outputs of a call against the case's own."""
    assert len(outputs) == len(case.expected)
    for found, expected in zip(outputs, case.expected, strict=True):
        assert found.shape == expected.shape
        assert_close(found, expected, case.name)
