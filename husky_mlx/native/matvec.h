// Weight rows times one token at a time: decoding, where reading the weights is what takes time.
#pragma once

#include "activations.h"
#include "matrix.h"

namespace husky {

namespace detail {

template <typename M, int GROUPS, typename T, int... J>
inline void add_groups(const uint32_t* words, const T* scales, const T* biases, const int8_t* x,
                       int64_t low, Floats x_scale, Floats x_sum, Floats& total,
                       std::integer_sequence<int, J...>) {
  constexpr int SCALES = GROUPS * GROUP / M::GROUP;
  constexpr int LANES_A_GROUP = GROUP * M::BITS / 32;
  constexpr int BYTES = GROUPS * GROUP * M::BITS / 8;
  const auto of_groups = [](const T* from) {
    return spread<M::GROUP / GROUP>(SCALES == LANES ? load_floats(from)
                                                    : load_floats(from, SCALES));
  };
  total += of_groups(biases) * x_sum;
  const Floats scale = of_groups(scales) * x_scale;
  const auto add_vector = [&](auto index) {
    constexpr int VECTOR = decltype(index)::value, LEFT = BYTES - VECTOR * 4 * LANES;
    if constexpr (LEFT > 0) {
      const uint32_t* from = words + VECTOR * LANES;
      const Words codes = LEFT >= 4 * LANES ? load<Words>(from) : load_some<Words>(from, LEFT);
      Ints dots{};
      if constexpr (M::BITS == 4) {
        const Words even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
        const int8_t* both = x + VECTOR * SPLIT_BLOCK;
        dots = dot4<4>(dots, even, load<Words>(both));
        dots = dot4<4>(dots, odd, load<Words>(both + SPLIT_BLOCK / 2)) << 8;
        dots = dot4<4>(dots, even, load<Words>(both + low));
        dots = dot4<4>(dots, odd, load<Words>(both + low + SPLIT_BLOCK / 2));
      } else {
        dots = dot4<8>(dots, codes, load<Words>(x + VECTOR * 4 * LANES)) << 8;
        dots = dot4<8>(dots, codes, load<Words>(x + low + VECTOR * 4 * LANES));
      }
      total += convert<Floats>(dots) * spread<LANES_A_GROUP, VECTOR * LANES / LANES_A_GROUP>(scale);
    }
  };
  (add_vector(std::integral_constant<int, J>{}), ...);
}

template <typename M, typename X>
inline Floats integer_row(const Tensor& tensor, int row, const X& x, int token) {
  using Vectors = std::make_integer_sequence<int, GROUP * M::BITS / 32>;
  constexpr int WHOLE = X::GROUPS / LANES, LEFT = X::GROUPS % LANES;
  const uint32_t* words = M::words(tensor, row);
  const auto* scales = M::scales(tensor, row);
  const auto* biases = M::biases(tensor, row);
  const int8_t* bytes = (M::BITS == 4 ? x.split : x.natural) + (int64_t)token * X::STRIDE;
  const float* x_scale = x.scale + (int64_t)token * X::GROUP_STRIDE;
  const float* x_sum = x.sum + (int64_t)token * X::GROUP_STRIDE;
  Floats total{};
  for (int chunk = 0; chunk < WHOLE; ++chunk) {
    add_groups<M, LANES>(words, scales, biases, bytes, x.low, load_floats(x_scale),
                         load_floats(x_sum), total, Vectors{});
    words += LANES * M::BITS;
    scales += LANES * GROUP / M::GROUP;
    biases += LANES * GROUP / M::GROUP;
    bytes += LANES * GROUP;
    x_scale += LANES;
    x_sum += LANES;
  }
  if constexpr (LEFT > 0)
    add_groups<M, LEFT>(words, scales, biases, bytes, x.low, load_floats(x_scale),
                        load_floats(x_sum), total, Vectors{});
  return total;
}

template <typename M, typename X>
inline Floats float_row(const Tensor& tensor, int row, const X& x, int token) {
  const float* values = x.row(token);
  Floats total[4] = {};
  int column = 0;
  for (; column + 4 * LANES <= M::COLUMNS; column += 4 * LANES)
    for (int i = 0; i < 4; ++i)
      total[i] += M::values(tensor, row, column + i * LANES, LANES) *
                  load_floats(values + column + i * LANES);
  in_vectors(M::COLUMNS - column, [&](int i, int count) {
    total[0] += M::values(tensor, row, column + i, count) * load_floats(values + column + i, count);
  });
  return total[0] + total[1] + (total[2] + total[3]);
}

}  // namespace detail

// out[token * stride + i] = row `first` + i times a token, for `rows` rows. Whole vectors are
// written: stride is a multiple of LANES.
template <typename M, bool INTEGER, typename X>
void multiply_rows(const Tensor& tensor, int first, int rows, const X& x, int token, int tokens,
                   float* out, int stride) {
  for (int base = 0; base < rows; base += LANES) {
    const int count = rows - base < LANES ? rows - base : LANES;
    for (int t = 0; t < tokens; ++t) {
      Floats sums[LANES] = {};
      for (int i = 0; i < count; ++i) {
        const int row = first + base + i;
        if constexpr (INTEGER)
          sums[i] = detail::integer_row<M>(tensor, row, x, token + t);
        else
          sums[i] = detail::float_row<M>(tensor, row, x, token + t);
      }
      store_floats(out + (int64_t)t * stride + base, sums_of_rows(sums));
    }
  }
}

}  // namespace husky
