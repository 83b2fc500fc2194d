// A small float product held in registers: attention's two, and products with float weights.
#pragma once

#include <type_traits>

#include "numbers.h"

namespace husky {

// 6 x 4 accumulators, 4 vectors and one broadcast fit the 32 registers of AVX-512.
constexpr int TILE_ROWS = LANES == 16 ? 6 : 3;
constexpr int TILE_VECTORS = 4;
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

namespace detail {

template <int ROWS, int VECTORS, typename T>
inline void add_tile(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int depth,
                     float* c, int64_t c_stride) {
  Floats total[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) total[i][j] = load_floats(c + i * c_stride + j * LANES);
  for (int k = 0; k < depth; ++k) {
    Floats right[VECTORS];
    for (int j = 0; j < VECTORS; ++j) right[j] = load_floats(b + k * b_stride + j * LANES);
    for (int i = 0; i < ROWS; ++i) {
      const Floats left = splat(a[i * a_stride + k]);
      for (int j = 0; j < VECTORS; ++j) total[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECTORS; ++j) store_floats(c + i * c_stride + j * LANES, total[i][j]);
}

template <int ROWS, typename T>
inline void add_columns(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int depth,
                        float* c, int64_t c_stride, int vectors) {
  for (; vectors >= TILE_VECTORS; vectors -= TILE_VECTORS, b += TILE_COLUMNS, c += TILE_COLUMNS)
    add_tile<ROWS, TILE_VECTORS>(a, a_stride, b, b_stride, depth, c, c_stride);
  for (; vectors >= 2; vectors -= 2, b += 2 * LANES, c += 2 * LANES)
    add_tile<ROWS, 2>(a, a_stride, b, b_stride, depth, c, c_stride);
  for (; vectors > 0; --vectors, b += LANES, c += LANES)
    add_tile<ROWS, 1>(a, a_stride, b, b_stride, depth, c, c_stride);
}

}  // namespace detail

// c += a b, a (rows, depth), b (depth, vectors * LANES).
template <typename T>
inline void add_product(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int depth,
                        float* c, int64_t c_stride, int rows, int vectors) {
  const auto add = [&](auto count) {
    constexpr int ROWS = decltype(count)::value;
    for (; rows >= ROWS; rows -= ROWS, a += ROWS * a_stride, c += ROWS * c_stride)
      detail::add_columns<ROWS>(a, a_stride, b, b_stride, depth, c, c_stride, vectors);
  };
  add(std::integral_constant<int, TILE_ROWS>{});
  if constexpr (TILE_ROWS > 3) add(std::integral_constant<int, 3>{});
  add(std::integral_constant<int, 1>{});
}

}  // namespace husky
