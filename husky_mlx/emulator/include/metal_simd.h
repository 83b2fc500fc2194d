// Simdgroup operations: each hands in one value a lane, waits for all 32, and computes from theirs.
#pragma once

namespace metal {

template <class T>
HUSKY_FUNC const T* exchange(const char* operation, const T& value, EmulatorPlace place) {
  static_assert(sizeof(T) <= 64, "a value of more than 64 bytes in a simdgroup operation");
  return static_cast<const T*>(emulator_exchange(operation, &value, sizeof(T), place));
}

// Metal leaves the value of a lane outside the simdgroup undefined: all bits set here (a NaN), so
// that a body which uses it gives a visibly wrong result.
template <class T>
HUSKY_FUNC T lane_or_garbage(const T* values, uint lane) {
  if (lane < 32) return values[lane];
  T garbage;
  __builtin_memset(&garbage, 0xff, sizeof(T));
  return garbage;
}

// Pairs at distance 16, 8, 4, 2, 1, as a butterfly of shuffles would add them.
#define HUSKY_REDUCTION(name, expression)                                              \
  template <class T> HUSKY_FUNC T simd_##name(T value, HUSKY_PLACE) {                  \
    const T* values = exchange("simd_" #name, value, place);                           \
    T partial[16];                                                                     \
    for (int i = 0; i < 16; i++) {                                                     \
      const T a = values[i], b = values[i + 16];                                       \
      partial[i] = static_cast<T>(expression);                                         \
    }                                                                                  \
    for (int n = 8; n > 0; n /= 2)                                                     \
      for (int i = 0; i < n; i++) {                                                    \
        const T a = partial[i], b = partial[i + n];                                    \
        partial[i] = static_cast<T>(expression);                                       \
      }                                                                                \
    return partial[0];                                                                 \
  }                                                                                    \
  template <class T> HUSKY_FUNC T quad_##name(T value, HUSKY_PLACE) {                  \
    const T* values = exchange("quad_" #name, value, place) + (emulator_lane() & ~3u); \
    T partial[2];                                                                      \
    for (int i = 0; i < 2; i++) {                                                      \
      const T a = values[i], b = values[i + 2];                                        \
      partial[i] = static_cast<T>(expression);                                         \
    }                                                                                  \
    const T a = partial[0], b = partial[1];                                            \
    return static_cast<T>(expression);                                                 \
  }
HUSKY_REDUCTION(sum, a + b)
HUSKY_REDUCTION(product, a * b)
HUSKY_REDUCTION(max, max(a, b))
HUSKY_REDUCTION(min, min(a, b))
HUSKY_REDUCTION(and, a & b)
HUSKY_REDUCTION(or, a | b)
HUSKY_REDUCTION(xor, a ^ b)
#undef HUSKY_REDUCTION

template <class T> HUSKY_FUNC T simd_prefix_inclusive_sum(T value, HUSKY_PLACE) {
  const T* values = exchange("simd_prefix_inclusive_sum", value, place);
  T sum = values[0];
  for (uint i = 1; i <= emulator_lane(); i++) sum = static_cast<T>(sum + values[i]);
  return sum;
}
template <class T> HUSKY_FUNC T simd_prefix_exclusive_sum(T value, HUSKY_PLACE) {
  const T* values = exchange("simd_prefix_exclusive_sum", value, place);
  T sum = T(0);
  for (uint i = 0; i < emulator_lane(); i++) sum = static_cast<T>(sum + values[i]);
  return sum;
}

template <class T> HUSKY_FUNC T simd_broadcast(T value, ushort lane, HUSKY_PLACE) {
  return lane_or_garbage(exchange("simd_broadcast", value, place), lane);
}
template <class T> HUSKY_FUNC T simd_broadcast_first(T value, HUSKY_PLACE) {
  return exchange("simd_broadcast_first", value, place)[0];
}
template <class T> HUSKY_FUNC T simd_shuffle(T value, ushort lane, HUSKY_PLACE) {
  return lane_or_garbage(exchange("simd_shuffle", value, place), lane);
}
template <class T> HUSKY_FUNC T simd_shuffle_xor(T value, ushort mask, HUSKY_PLACE) {
  return lane_or_garbage(exchange("simd_shuffle_xor", value, place), emulator_lane() ^ mask);
}
template <class T> HUSKY_FUNC T simd_shuffle_down(T value, ushort delta, HUSKY_PLACE) {
  return lane_or_garbage(exchange("simd_shuffle_down", value, place), emulator_lane() + delta);
}
template <class T> HUSKY_FUNC T simd_shuffle_up(T value, ushort delta, HUSKY_PLACE) {
  return lane_or_garbage(exchange("simd_shuffle_up", value, place), emulator_lane() - delta);
}
template <class T> HUSKY_FUNC T quad_broadcast(T value, ushort lane, HUSKY_PLACE) {
  return exchange("quad_broadcast", value, place)[(emulator_lane() & ~3u) | (lane & 3u)];
}
template <class T> HUSKY_FUNC T quad_shuffle_xor(T value, ushort mask, HUSKY_PLACE) {
  return exchange("quad_shuffle_xor", value, place)[emulator_lane() ^ (mask & 3u)];
}
HUSKY_FUNC bool simd_all(bool value, HUSKY_PLACE) {
  const bool* values = exchange("simd_all", value, place);
  bool result = true;
  for (int i = 0; i < 32; i++) result = result && values[i];
  return result;
}
HUSKY_FUNC bool simd_any(bool value, HUSKY_PLACE) {
  const bool* values = exchange("simd_any", value, place);
  bool result = false;
  for (int i = 0; i < 32; i++) result = result || values[i];
  return result;
}

// Apple's places: simdgroup_matrix elements sit in 4x2 blocks of lanes.
struct MatrixPlace { uint row, column; };
HUSKY_FUNC MatrixPlace matrix_place() {
  const uint lane = emulator_lane();
  return {(lane / 4 & 4u) + lane / 2 % 4, (lane / 4 & 2u) * 2 + lane % 2 * 2};
}
HUSKY_FUNC uint matrix_lane(uint row, uint column) {
  return (row & 4u) << 2 | (column & 4u) << 1 | (row & 3u) << 1 | (column & 2u) >> 1;
}
template <class D, class A, class B, class C>
HUSKY_FUNC void matrix_multiply_add(vec<D, 2>& d, vec<A, 2> a, vec<B, 2> b, vec<C, 2> c,
                                    HUSKY_PLACE) {
  struct Operands { A a[2]; B b[2]; };
  const Operands mine = {{a[0], a[1]}, {b[0], b[1]}};
  const Operands* all = exchange("simdgroup_multiply_accumulate", mine, place);
  const MatrixPlace at = matrix_place();
  for (uint column = 0; column < 2; column++) {
    float sum = static_cast<float>(c[column]);
    for (uint k = 0; k < 8; k++)
      sum += static_cast<float>(all[matrix_lane(at.row, k)].a[k & 1]) *
             static_cast<float>(all[matrix_lane(k, at.column)].b[column]);
    d[column] = D(sum);
  }
}

}  // namespace metal
