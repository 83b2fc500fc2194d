// inputs: qkv constants q_norm k_norm place keys values
// outputs: queries
// template: T BITS GROUP K HEADS KV_HEADS D HAS_BIAS EPS_BITS TRADITIONAL MAGNITUDE_BITS BATCHED
#include "constants.h"
#include "rope.h"
// rope_append with an RMS norm of each head of q and of k before the rotation: q_norm, k_norm (D,),
// all T. queries are (L, HEADS, D). The L rows of one sequence go to
// place[0], place[0] + 1, ... at the positions from place[4] on; those of a batch (BATCHED) all to
// place[0] of their own sequence, at the positions place[4], place[5], ...
// EPS_BITS: the norm's float32 epsilon as an integer. A simdgroup takes a head of a row, a lane four
// of its pairs.
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
constexpr int QUADS = D / 8;
constexpr Parts AT = parts<T, BITS, GROUP, ALL_HEADS * D, K, HAS_BIAS>();
const int length = qkv_shape[0];
const int quad = int(thread_index_in_simdgroup);
const int unit = int(thread_position_in_grid.x) / 32;
const int head = unit % ALL_HEADS;
const int row = unit / ALL_HEADS;
const bool live = row < length && quad < QUADS;
float pairs[8];
float squares = 0.0f;
#pragma unroll
for (int i = 0; i < 8; i++) {
  pairs[i] = 0.0f;
}
if (live) {
  load_quad<T, D, TRADITIONAL>(qkv + (size_t(row) * ALL_HEADS + head) * D, quad, pairs);
}
#pragma unroll
for (int i = 0; i < 8; i++) {
  squares += pairs[i] * pairs[i];
}
squares = simd_sum(squares);
if (live) {
  if (head < HEADS + KV_HEADS) {
    const float scale = metal::precise::rsqrt(squares / float(D) + as_type<float>(EPS_BITS));
    float factors[8];
    load_quad<T, D, TRADITIONAL>(head < HEADS ? q_norm : k_norm, quad, factors);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      pairs[i] *= scale * factors[i];
    }
    const device float* frequencies = part<float>(constants, AT.rest + part_words(K * sizeof(T)));
    rotate_four<TRADITIONAL, MAGNITUDE_BITS>(
        pairs, frequencies + 4 * quad, float(BATCHED ? place[4 + row] : place[4] + row));
  }
  device T* target = queries + (size_t(row) * HEADS + head) * D;
  if (head >= HEADS) {
    const int kv_head = (head - HEADS) % KV_HEADS + (BATCHED ? row * KV_HEADS : 0);
    const size_t kv_row = size_t(kv_head) * keys_shape[2] + place[0] + (BATCHED ? 0 : row);
    target = (head < HEADS + KV_HEADS ? mutable_input(keys) : mutable_input(values)) + kv_row * D;
  }
  store_quad<T, D, TRADITIONAL>(pairs, quad, target);
}
