// inputs: x constants place keys values
// outputs: queries
// template: T BITS GROUP K M HEADS KV_HEADS D ROWS SIMDGROUPS KSPLIT UNROLL QUEUE NORM INTEGER EPS_BITS HAS_BIAS TRADITIONAL MAGNITUDE_BITS BATCHED
#include "constants.h"
#include "gemv.h"
// queries (M, HEADS, D) rotated, and one more row in keys and values (BATCHED ? M : 1, KV_HEADS,
// capacity, D), written in place: whoever reads them takes `queries` as an input, for the order.
// x (M, K); the matrix has HEADS * D rows of q, then KV_HEADS * D of k and of v; bias by row.
// After bias in constants.h: norm, then frequencies float32 (D / 2,), radians a position.
// place int32 (16,): the slot to write; 4 is the first row's position, of a batch 4, 5, ... the rows'.
// The M rows of one sequence go to slot, slot + 1, ..., those of a batch to the same one.
// NORM false: x is normed already. EPS_BITS: the norm's float32 epsilon as an integer; so is
// MAGNITUDE_BITS, what the rotated values are multiplied by.
// Grid: for each head of q, k and v, one after the other, ceil(D / TILE) threadgroups.
constexpr int TILE = ROWS * SIMDGROUPS / KSPLIT;
constexpr int STAGED = gemv_staged<T, BITS, GROUP, K, M, SIMDGROUPS, NORM, INTEGER>();
constexpr int QUEUED = gemv_queued<T, BITS, GROUP, K, M, ROWS, SIMDGROUPS, UNROLL, QUEUE>();
constexpr int SUMS = gemv_partial<M, ROWS, SIMDGROUPS, KSPLIT>();
constexpr int ALL_ROWS = (HEADS + 2 * KV_HEADS) * D;
constexpr int HEAD_TILES = (D + TILE - 1) / TILE;
constexpr Parts AT = parts<T, BITS, GROUP, ALL_ROWS, K, HAS_BIAS>();
threadgroup float4 staged[STAGED];
threadgroup float4 queued[QUEUED];
threadgroup float partial[SUMS];
const float eps = as_type<float>(EPS_BITS);
const uint head = threadgroup_position_in_grid.x / HEAD_TILES;
// The first pair of this tile: rows i and i + D / 2 of a head, or neighbours.
const uint first_pair = threadgroup_position_in_grid.x % HEAD_TILES * (TILE / 2);
const uint first = head * D + (TRADITIONAL ? 2 * first_pair : first_pair);
// What the rotation takes, asked for ahead of the product: behind it that would cost another trip to
// memory.
constexpr int THREADS = 32 * SIMDGROUPS;
constexpr int SHARE = (M * (TILE / 2) + THREADS - 1) / THREADS;
const int slot = place[0];
int positions[SHARE];
float frequencies[SHARE];
#pragma unroll
for (int s = 0; s < SHARE; s++) {
  const uint i = min(thread_index_in_threadgroup + s * THREADS, uint(M * (TILE / 2) - 1));
  const uint m = i / (TILE / 2);
  const uint pair = min(first_pair + i % (TILE / 2), uint(D / 2 - 1));
  positions[s] = BATCHED ? place[4 + m] : place[4] + int(m);
  frequencies[s] = part<float>(constants, AT.rest + part_words(K * sizeof(T)))[pair];
}
gemv<T, BITS, GROUP, K, ALL_ROWS, M, ROWS, SIMDGROUPS, KSPLIT, UNROLL, QUEUE, NORM, INTEGER>(
    x, part<T>(constants, AT.rest), eps, constants, part<T>(constants, AT.scales),
    part<T>(constants, AT.biases), first, first + (TRADITIONAL ? TILE / 2 : D / 2), staged, queued, partial,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
#pragma unroll
for (int s = 0; s < SHARE; s++) {
  const uint i = thread_index_in_threadgroup + s * THREADS;
  const uint m = i / (TILE / 2);
  const uint t = i % (TILE / 2);
  const uint pair = first_pair + t;
  if (i < M * (TILE / 2) && pair < D / 2) {
    const uint left = TRADITIONAL ? 2 * pair : pair;
    const uint right = TRADITIONAL ? left + 1 : left + D / 2;
    float a = gemv_value<T, K, M, TILE, KSPLIT, NORM>(partial, eps, m, TRADITIONAL ? 2 * t : t);
    float b = gemv_value<T, K, M, TILE, KSPLIT, NORM>(
        partial, eps, m, TRADITIONAL ? 2 * t + 1 : TILE / 2 + t);
    if (HAS_BIAS) {
      a += float(part<T>(constants, AT.bias)[head * D + left]);
      b += float(part<T>(constants, AT.bias)[head * D + right]);
    }
    if (head < HEADS + KV_HEADS) {
      const float angle = float(positions[s]) * frequencies[s];
      const float magnitude = as_type<float>(MAGNITUDE_BITS);
      const float cosine = metal::precise::cos(angle) * magnitude;
      const float sine = metal::precise::sin(angle) * magnitude;
      const float turned = a * cosine - b * sine;
      b = a * sine + b * cosine;
      a = turned;
    }
    if (head < HEADS) {
      queries[(m * HEADS + head) * D + left] = T(a);
      queries[(m * HEADS + head) * D + right] = T(b);
    } else {
      const uint kv_head = (head - HEADS) % KV_HEADS + (BATCHED ? m * KV_HEADS : 0);
      const size_t row = size_t(kv_head) * keys_shape[2] + slot + (BATCHED ? 0 : m);
      device T* cache = head < HEADS + KV_HEADS ? mutable_input(keys) : mutable_input(values);
      cache[row * D + left] = T(a);
      cache[row * D + right] = T(b);
    }
  }
}
