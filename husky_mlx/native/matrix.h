// The storage of a weight matrix, as MLX lays it out: plain rows, or affine codes in 32 bit words
// (first code in the lowest bits) with a scale and a bias for each group of a row.
#pragma once

#include <type_traits>

#include "numbers.h"

namespace husky {

// What a weight matrix is made of; parts that its format lacks are null.
struct Tensor {
  const void* weight;
  const void* scales;
  const void* biases;
  const void* bias;
};

template <int ROWS_, int COLUMNS_, typename T, typename BIAS_ = None>
struct Dense {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr bool PACKED = false;
  using Bias = BIAS_;

  // Columns [column, column + count) of a row; count is at most LANES.
  static Floats values(const Tensor& tensor, int row, int column, int count) {
    const T* from = static_cast<const T*>(tensor.weight) + (int64_t)row * COLUMNS + column;
    return count == LANES ? load_floats(from) : load_floats(from, count);
  }
};

template <int ROWS_, int COLUMNS_, int BITS_, int GROUP_, typename T, typename BIAS_ = None>
struct Affine {
  static_assert(BITS_ == 4 || BITS_ == 8);
  static_assert(GROUP_ % 32 == 0 && COLUMNS_ % GROUP_ == 0);
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, BITS = BITS_, GROUP = GROUP_;
  static constexpr bool PACKED = true;
  static constexpr int WORDS = COLUMNS * BITS / 32, GROUPS = COLUMNS / GROUP;
  using Bias = BIAS_;

  static const uint32_t* words(const Tensor& tensor, int row) {
    return static_cast<const uint32_t*>(tensor.weight) + (int64_t)row * WORDS;
  }
  static const T* scales(const Tensor& tensor, int row) {
    return static_cast<const T*>(tensor.scales) + (int64_t)row * GROUPS;
  }
  static const T* biases(const Tensor& tensor, int row) {
    return static_cast<const T*>(tensor.biases) + (int64_t)row * GROUPS;
  }

  // Columns [column, column + LANES) of a row; a group holds whole vectors.
  static Floats values(const Tensor& tensor, int row, int column, int) {
    const int group = column / GROUP;
    const float scale = load_floats(scales(tensor, row) + group, 1)[0];
    const float bias = load_floats(biases(tensor, row) + group, 1)[0];
    const uint8_t* from = reinterpret_cast<const uint8_t*>(words(tensor, row)) + column * BITS / 8;
    return codes(from, std::make_integer_sequence<int, LANES>{}) * scale + bias;
  }

 private:
  template <int... I>
  static Floats codes(const uint8_t* from, std::integer_sequence<int, I...>) {
    if constexpr (BITS == 8) return convert<Floats>(load<Vector<uint8_t, LANES>>(from));
    const Words words = load_some<Words>(from, LANES / 2);
    const Words each = shuffles::pick<(I / 8)...>(words, words);
    return convert<Floats>((Ints)(each >> Words{(I % 8 * 4)...} & 15u));
  }
};

// Adds the bias of rows [row, row + rows), if there is one.
template <typename M>
inline void add_bias(const Tensor& tensor, int row, int rows, float* out) {
  if constexpr (!std::is_same_v<typename M::Bias, None>) {
    const auto* bias = static_cast<const typename M::Bias*>(tensor.bias) + row;
    in_vectors(rows, [&](int i, int count) {
      store_floats(out + i, load_floats(out + i, count) + load_floats(bias + i, count), count);
    });
  }
}

}  // namespace husky
