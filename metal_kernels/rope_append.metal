// inputs: qkv constants place keys values
// outputs: queries
// template: T BITS GROUP K HEADS KV_HEADS D HAS_BIAS TRADITIONAL
#include "constants.h"
// A prompt's projections (L, (HEADS + 2 KV_HEADS) D): queries (HEADS, L, D) and keys rotated, keys
// and values written in place to keys and values (1, KV_HEADS, capacity, D), from the slot on that
// place int32 (16,) begins with; place[4] is the position of the first row. constants: those of the
// projections, for the frequencies after its norm (K,). Whoever reads the cache takes `queries` as an
// input, for the order. A thread takes four pairs of a head.
constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
constexpr int QUADS = D / 8;
constexpr Parts AT = parts<T, BITS, GROUP, ALL_HEADS * D, K, HAS_BIAS>();
typedef vec<T, 4> Four;
const int length = qkv_shape[0];
const int at = int(thread_position_in_grid.x);
if (at < length * ALL_HEADS * QUADS) {
  const int quad = at % QUADS;
  const int head = at / QUADS % ALL_HEADS;
  const int row = at / QUADS / ALL_HEADS;
  const int left = TRADITIONAL ? 2 * quad : quad;
  const int right = TRADITIONAL ? left + 1 : quad + D / 8;
  const device Four* source = reinterpret_cast<const device Four*>(qkv) + (size_t(row) * ALL_HEADS + head) * (D / 4);
  Four a = source[left];
  Four b = source[right];
  if (head < HEADS + KV_HEADS) {
    const device float* frequencies = part<float>(constants, AT.rest + part_words(K * sizeof(T))) + 4 * quad;
    const float position = float(place[4] + row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float angle = position * frequencies[i];
      const float cosine = metal::precise::cos(angle);
      const float sine = metal::precise::sin(angle);
      float x = float(a[i]);
      float y = float(b[i]);
      if (TRADITIONAL) {
        x = float(i < 2 ? a[2 * i] : b[2 * i - 4]);
        y = float(i < 2 ? a[2 * i + 1] : b[2 * i - 3]);
      }
      const T turned_x = T(x * cosine - y * sine);
      const T turned_y = T(x * sine + y * cosine);
      if (!TRADITIONAL) {
        a[i] = turned_x;
        b[i] = turned_y;
      } else if (i < 2) {
        a[2 * i] = turned_x;
        a[2 * i + 1] = turned_y;
      } else {
        b[2 * i - 4] = turned_x;
        b[2 * i - 3] = turned_y;
      }
    }
  }
  device T* target = queries + (size_t(head) * length + row) * D;
  if (head >= HEADS) {
    const size_t kv_row = size_t((head - HEADS) % KV_HEADS) * keys_shape[2] + place[0] + row;
    target = (head < HEADS + KV_HEADS ? mutable_input(keys) : mutable_input(values)) + kv_row * D;
  }
  reinterpret_cast<device Four*>(target)[left] = a;
  reinterpret_cast<device Four*>(target)[right] = b;
}
