// inputs: x norm weight scales biases bias frequencies positions slot keys values
// outputs: queries
// template: T BITS GROUP K M HEADS KV_HEADS D ROWS SIMDGROUPS KSPLIT UNROLL NORM EPS_BITS HAS_BIAS TRADITIONAL BATCHED
#include "gemv.h"
// queries (M, HEADS, D) rotated, and one more row in keys and values (BATCHED ? M : 1, KV_HEADS,
// capacity, D), written in place: whoever reads them takes `queries` as an input, for the order.
// x (M, K); the matrix has HEADS * D rows of q, then KV_HEADS * D of k and of v; bias by row.
// frequencies float32 (D / 2,): radians a position. positions int32 (M,). slot int32: the row to
// write; the M rows of one sequence go to slot, slot + 1, ..., those of a batch to the same one.
// NORM false: x is normed already. EPS_BITS: the norm's float32 epsilon as an integer.
// Grid: for each head of q, k and v, one after the other, ceil(D / TILE) threadgroups.
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, K, M, NORM>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
constexpr int ALL_ROWS = (HEADS + 2 * KV_HEADS) * D;
constexpr int HEAD_TILES = (D + TILE - 1) / TILE;
threadgroup float4 staged[STAGED];
threadgroup float partial[SUMS];
const float eps = as_type<float>(EPS_BITS);
const uint head = threadgroup_position_in_grid.x / HEAD_TILES;
// The first pair of this tile: rows i and i + D / 2 of a head, or neighbours.
const uint first_pair = threadgroup_position_in_grid.x % HEAD_TILES * (TILE / 2);
const uint first = head * D + (TRADITIONAL ? 2 * first_pair : first_pair);
gemv<T, BITS, GROUP, K, ALL_ROWS, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, NORM>(
    x, norm, eps, weight, scales, biases, first, first + (TRADITIONAL ? TILE / 2 : D / 2), staged,
    partial, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
for (uint i = thread_index_in_threadgroup; i < M * (TILE / 2); i += 32 * SIMDGROUPS) {
  const uint m = i / (TILE / 2);
  const uint t = i % (TILE / 2);
  const uint pair = first_pair + t;
  if (pair < D / 2) {
    const uint left = TRADITIONAL ? 2 * pair : pair;
    const uint right = TRADITIONAL ? left + 1 : left + D / 2;
    float a = gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, TRADITIONAL ? 2 * t : t);
    float b = gemv_value<T, K, M, TILE, KSPLIT, NORM>(
        partial, eps, m, TRADITIONAL ? 2 * t + 1 : TILE / 2 + t);
    if (HAS_BIAS) {
      a += float(bias[head * D + left]);
      b += float(bias[head * D + right]);
    }
    if (head < HEADS + KV_HEADS) {
      const float angle = float(positions[m]) * frequencies[pair];
      const float cosine = metal::precise::cos(angle);
      const float sine = metal::precise::sin(angle);
      const float turned = a * cosine - b * sine;
      b = a * sine + b * cosine;
      a = turned;
    }
    if (head < HEADS) {
      queries[(m * HEADS + head) * D + left] = T(a);
      queries[(m * HEADS + head) * D + right] = T(b);
    } else {
      const uint kv_head = (head - HEADS) % KV_HEADS + (BATCHED ? m * KV_HEADS : 0);
      const size_t row = size_t(kv_head) * keys_shape[2] + slot[0] + (BATCHED ? 0 : m);
      device T* cache = head < HEADS + KV_HEADS ? mutable_input(keys) : mutable_input(values);
      cache[row * D + left] = T(a);
      cache[row * D + right] = T(b);
    }
  }
}
