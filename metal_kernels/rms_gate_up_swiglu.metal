// inputs: x constants
// outputs: activated
// template: T BITS GROUP K N M ROWS SIMDGROUPS KSPLIT UNROLL QUEUE NORM INTEGER EPS_BITS HAS_BIAS
#include "constants.h"
#include "gemv.h"
// activated (M, N) = silu(gate) * up of x (M, K) after RMS norm by norm (K,); NORM false: x is
// normed already. The matrix has N rows of gate, then N of up; bias (2 N,) if HAS_BIAS;
// norm is the last part in constants.h. EPS_BITS: the norm's float32 epsilon as an integer. Grid: a
// threadgroup for TILE / 2 elements.
constexpr Parts AT = parts<T, BITS, GROUP, 2 * N, K, HAS_BIAS>();
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, BITS, GROUP, K, M, SIMDGROUPS, NORM, INTEGER>();
constexpr int QUEUED = gemv_queued<T, BITS, GROUP, K, M, ROWS, SIMDGROUPS, UNROLL, QUEUE>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
threadgroup float4 staged[STAGED];
threadgroup float4 queued[QUEUED];
threadgroup float partial[SUMS];
const float eps = as_type<float>(EPS_BITS);
const uint first = threadgroup_position_in_grid.x * (TILE / 2);
gemv<T, BITS, GROUP, K, 2 * N, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM, INTEGER>(
    x, part<T>(constants, AT.rest), eps, constants, part<T>(constants, AT.scales),
    part<T>(constants, AT.biases), first, first + N, staged, queued, partial, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);
for (uint i = thread_index_in_threadgroup; i < M * (TILE / 2); i += 32 * SIMDGROUPS) {
  const uint m = i / (TILE / 2);
  const uint t = i % (TILE / 2);
  const uint row = first + t;
  if (row < N) {
    float gate = gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, t);
    float up = gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, TILE / 2 + t);
    if (HAS_BIAS) {
      gate += float(part<T>(constants, AT.bias)[row]);
      up += float(part<T>(constants, AT.bias)[N + row]);
    }
    activated[m * N + row] = T(gate / (1.0f + metal::precise::exp(-gate)) * up);
  }
}
