// inputs: qkv constants place keys values
// outputs: queries
// template: T BITS GROUP K HEADS KV_HEADS D HAS_BIAS TRADITIONAL MAGNITUDE_BITS
#include "constants.h"
#include "rope.h"
// A prompt's projections (L, (HEADS + 2 KV_HEADS) D): queries (L, HEADS, D) and keys rotated, keys
// and values written in place to keys and values (1, KV_HEADS, capacity, D), from the slot on that
// place int32 (16,) begins with; place[4] is the position of the first row. constants: those of the
// projections, for the frequencies after its norm (K,). Whoever reads the cache takes `queries` as an
// input, for the order. A thread takes four pairs of a head.
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
constexpr int QUADS = D / 8;
constexpr Parts AT = parts<T, BITS, GROUP, ALL_HEADS * D, K, HAS_BIAS>();
const int length = qkv_shape[0];
const int at = int(thread_position_in_grid.x);
if (at < length * ALL_HEADS * QUADS) {
  const int quad = at % QUADS;
  const int head = at / QUADS % ALL_HEADS;
  const int row = at / QUADS / ALL_HEADS;
  float pairs[8];
  load_quad<T, D, TRADITIONAL>(qkv + (size_t(row) * ALL_HEADS + head) * D, quad, pairs);
  if (head < HEADS + KV_HEADS) {
    const device float* frequencies = part<float>(constants, AT.rest + part_words(K * sizeof(T)));
    rotate_four<TRADITIONAL, MAGNITUDE_BITS>(pairs, frequencies + 4 * quad, float(place[4] + row));
  }
  device T* target = queries + (size_t(row) * HEADS + head) * D;
  if (head >= HEADS) {
    const size_t kv_row = size_t((head - HEADS) % KV_HEADS) * keys_shape[2] + place[0] + row;
    target = (head < HEADS + KV_HEADS ? mutable_input(keys) : mutable_input(values)) + kv_row * D;
  }
  store_quad<T, D, TRADITIONAL>(pairs, quad, target);
}
