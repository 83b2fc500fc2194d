// Simdgroup operations as warp shuffles, and simdgroup_matrix as tensor core instructions. Every
// operation takes all 32 lanes; bodies keep to that.
#pragma once

namespace metal {

HUSKY_FUNC uint warp_lane() {
  uint lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

enum class Shuffle { from, exclusive_or, down, up };

template <Shuffle kind> HUSKY_FUNC uint shuffle_word(uint word, uint argument) {
  if constexpr (kind == Shuffle::from) return __shfl_sync(0xffffffffu, word, argument);
  if constexpr (kind == Shuffle::exclusive_or) return __shfl_xor_sync(0xffffffffu, word, argument);
  if constexpr (kind == Shuffle::down) return __shfl_down_sync(0xffffffffu, word, argument);
  return __shfl_up_sync(0xffffffffu, word, argument);
}

template <Shuffle kind, class T> HUSKY_FUNC T shuffle(T value, uint argument) {
  constexpr int words = (sizeof(T) + 3) / 4;
  union Words {
    uint word[words];
    T value;
    HUSKY_FUNC Words() {}
  } bits;
  bits.word[words - 1] = 0;
  bits.value = value;
  for (int i = 0; i < words; i++) bits.word[i] = shuffle_word<kind>(bits.word[i], argument);
  return bits.value;
}

template <class T> HUSKY_FUNC T simd_shuffle(T value, ushort lane) {
  return shuffle<Shuffle::from>(value, lane);
}
template <class T> HUSKY_FUNC T simd_broadcast(T value, ushort lane) {
  return shuffle<Shuffle::from>(value, lane);
}
template <class T> HUSKY_FUNC T simd_broadcast_first(T value) {
  return shuffle<Shuffle::from>(value, 0);
}
template <class T> HUSKY_FUNC T simd_shuffle_xor(T value, ushort mask) {
  return shuffle<Shuffle::exclusive_or>(value, mask);
}
template <class T> HUSKY_FUNC T simd_shuffle_down(T value, ushort delta) {
  return shuffle<Shuffle::down>(value, delta);
}
template <class T> HUSKY_FUNC T simd_shuffle_up(T value, ushort delta) {
  return shuffle<Shuffle::up>(value, delta);
}
template <class T> HUSKY_FUNC T quad_broadcast(T value, ushort lane) {
  return shuffle<Shuffle::from>(value, (warp_lane() & ~3u) | (lane & 3u));
}
template <class T> HUSKY_FUNC T quad_shuffle_xor(T value, ushort mask) {
  return shuffle<Shuffle::exclusive_or>(value, mask & 3u);
}

#define HUSKY_REDUCTION(name, expression)                         \
  template <int first, class T> HUSKY_FUNC T reduce_##name(T a) { \
    for (int distance = first; distance > 0; distance /= 2) {     \
      const T b = simd_shuffle_xor(a, distance);                  \
      a = static_cast<T>(expression);                             \
    }                                                             \
    return a;                                                     \
  }                                                               \
  template <class T> HUSKY_FUNC T simd_##name(T value) { return reduce_##name<16>(value); } \
  template <class T> HUSKY_FUNC T quad_##name(T value) { return reduce_##name<2>(value); }
HUSKY_REDUCTION(sum, a + b)
HUSKY_REDUCTION(product, a * b)
HUSKY_REDUCTION(max, max(a, b))
HUSKY_REDUCTION(min, min(a, b))
HUSKY_REDUCTION(and, a & b)
HUSKY_REDUCTION(or, a | b)
HUSKY_REDUCTION(xor, a ^ b)
#undef HUSKY_REDUCTION

template <class T> HUSKY_FUNC T simd_prefix_inclusive_sum(T value) {
  for (uint distance = 1; distance < 32; distance *= 2) {
    const T before = simd_shuffle_up(value, distance);
    if (warp_lane() >= distance) value = static_cast<T>(value + before);
  }
  return value;
}
template <class T> HUSKY_FUNC T simd_prefix_exclusive_sum(T value) {
  const T before = simd_shuffle_up(simd_prefix_inclusive_sum(value), 1);
  return warp_lane() == 0 ? T(0) : before;
}
HUSKY_FUNC bool simd_all(bool value) { return __all_sync(0xffffffffu, value); }
HUSKY_FUNC bool simd_any(bool value) { return __any_sync(0xffffffffu, value); }

// NVIDIA's places for an 8x8 fragment: four lanes a row.
struct MatrixPlace { uint row, column; };
HUSKY_FUNC MatrixPlace matrix_place() { return {warp_lane() / 4, warp_lane() % 4 * 2}; }
HUSKY_FUNC uint matrix_lane(uint row, uint column) { return row * 4 + column / 2; }

// The upper 8 rows of the 16x8x8 instruction hold the matrix, the lower 8 are zero.
#define HUSKY_TENSOR_CORE(type)                                                                 \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                            \
               ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"                             \
               : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)                                         \
               : "r"(rows), "r"(0), "r"(columns), "f"(c[0]), "f"(c[1]), "f"(0.0f), "f"(0.0f))

template <class D, class A, class B, class C>
HUSKY_FUNC void matrix_multiply_add(vec<D, 2>& d, vec<A, 2> a, vec<B, 2> b, vec<C, 2> c) {
  if constexpr (is_same_v<A, B> && is_small_float_v<A> && is_same_v<D, float> &&
                is_same_v<C, float>) {
    const uint rows = as_type<uint>(a);
    uint columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(columns)
                 : "r"(as_type<uint>(b)));
    float d0, d1, d2, d3;
    if constexpr (is_same_v<A, half>) {
      HUSKY_TENSOR_CORE("f16");
    } else {
      HUSKY_TENSOR_CORE("bf16");
    }
    d = vec<float, 2>(d0, d1);
  } else {
    const MatrixPlace at = matrix_place();
    float sum[2] = {static_cast<float>(c[0]), static_cast<float>(c[1])};
    for (uint k = 0; k < 8; k++) {
      const uint from = matrix_lane(at.row, k);
      const float even = simd_shuffle(static_cast<float>(a[0]), from);
      const float odd = simd_shuffle(static_cast<float>(a[1]), from);
      for (uint column = 0; column < 2; column++)
        sum[column] += (k & 1 ? odd : even) * simd_shuffle(static_cast<float>(b[column]),
                                                           matrix_lane(k, at.column));
    }
    d = vec<D, 2>(D(sum[0]), D(sum[1]));
  }
}
#undef HUSKY_TENSOR_CORE

}  // namespace metal
