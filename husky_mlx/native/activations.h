// The input of a matrix product: floats, and 8 bit integers with one scale for each 32 of them.
//
// x is replaced by scale * q with q = round(x / scale), scale = max|x| / 127 over its group, so
// that |x - scale * q| <= scale / 2: an output is off by at most sum over groups of max|x| / 254 *
// sum|w|, w being the group's weights, besides float rounding. Both terms of an affine weight, code
// * s + b, take the same q: with the exact sum of x in the second one the error would be that of
// the codes, which are all positive, instead of that of the weights.
#pragma once

#include "numbers.h"

namespace husky {

constexpr int GROUP = 32;
// Elements whose 4 bit codes fill one vector.
constexpr int SPLIT_BLOCK = 8 * LANES;

// How a product takes its input.
enum Layout : int {
  FLOATS = 0,
  NATURAL = 1,  // 8 bit integers in order, for 8 bit weights
  SPLIT = 2,    // in each block the even elements first: the low halves of 4 bit weights' bytes
};

template <int WIDTH>
struct Activations {
  static constexpr int GROUPS = WIDTH / GROUP;
  static constexpr int STRIDE = round_up(WIDTH, SPLIT_BLOCK);
  static constexpr int GROUP_STRIDE = round_up(GROUPS, LANES);

  float* values;
  int8_t* natural;
  int8_t* split;
  float* scale;  // of each group
  float* sum;    // of each group's integers, times their scale

  static constexpr int64_t bytes(int tokens) {
    return (int64_t)tokens * (STRIDE * 6 + GROUP_STRIDE * 8);
  }

  // Over zeroed memory: what is behind the last group stays zero.
  Activations(char* memory, int tokens) {
    values = reinterpret_cast<float*>(memory);
    scale = values + (int64_t)tokens * STRIDE;
    sum = scale + (int64_t)tokens * GROUP_STRIDE;
    natural = reinterpret_cast<int8_t*>(sum + (int64_t)tokens * GROUP_STRIDE);
    split = natural + (int64_t)tokens * STRIDE;
  }

  float* row(int token) const { return values + (int64_t)token * STRIDE; }

  // Sets the integers of one group from its values; LAYOUTS is a set of layouts. `rest`, a row,
  // gets what they leave of the values.
  template <int LAYOUTS>
  void quantise(int token, int group, float* rest = nullptr) const {
    constexpr int PARTS = GROUP / LANES;
    const float* from = row(token) + group * GROUP;
    Floats part[PARTS];
    Ints magnitude{};
    for (int i = 0; i < PARTS; ++i) {
      part[i] = load_floats(from + i * LANES);
      // As integers a NaN is above all numbers, and the scale will be one.
      const Ints bits = bits_as<Ints>(part[i]) & 0x7fffffff;
      magnitude = larger(magnitude, bits);
    }
    const float limit = bits_as<float>(reduce(magnitude, larger<Ints>)[0]);
    // 127 / limit must be a number.
    const float inverse = limit < 1e-30f ? 0.0f : 127.0f / limit;
    const float step = limit < 1e-30f ? 0.0f : limit / 127.0f;
    Vector<int8_t, GROUP> bytes;
    Ints total{};
    for (int i = 0; i < PARTS; ++i) {
      // The sum's low bits are the rounded integer.
      const Ints q = bits_as<Ints>(part[i] * inverse + 12582912.0f) - 0x4b400000;
      const auto narrow = convert<Vector<int8_t, LANES>>(q);
      store(reinterpret_cast<int8_t*>(&bytes) + i * LANES, narrow);
      total += convert<Ints>(narrow);  // not q, which an infinity makes anything
    }
    if (rest != nullptr)
      for (int i = 0; i < PARTS; ++i) {
        const auto narrow = load<Vector<int8_t, LANES>>((const int8_t*)&bytes + i * LANES);
        store_floats(rest + group * GROUP + i * LANES, part[i] - convert<Floats>(narrow) * step);
      }
    const int64_t at = (int64_t)token * GROUP_STRIDE + group;
    scale[at] = step;
    sum[at] = step * (float)husky::sum(total);
    if constexpr (LAYOUTS & NATURAL)
      store(natural + (int64_t)token * STRIDE + group * GROUP, bytes);
    if constexpr (LAYOUTS & SPLIT) {
      constexpr int IN_BLOCK = SPLIT_BLOCK / GROUP;
      int8_t* to = split + (int64_t)token * STRIDE + group / IN_BLOCK * SPLIT_BLOCK;
      to += group % IN_BLOCK * (GROUP / 2);
      const auto pairs = bits_as<Vector<uint16_t, GROUP / 2>>(bytes);
      store(to, convert<Vector<uint8_t, GROUP / 2>>(pairs & (uint16_t)255));
      store(to + SPLIT_BLOCK / 2, convert<Vector<uint8_t, GROUP / 2>>(pairs >> 8));
    }
  }

  template <int LAYOUTS>
  void quantise(int token) const {
    if constexpr (LAYOUTS != FLOATS)
      for (int group = 0; group < GROUPS; ++group) quantise<LAYOUTS>(token, group);
  }

  // The same in two parts, these and `rest`, which together have nearly 16 bits.
  template <int LAYOUTS>
  void quantise(int token, const Activations& rest) const {
    for (int group = 0; group < GROUPS; ++group) quantise<LAYOUTS>(token, group, rest.row(token));
    rest.template quantise<LAYOUTS>(token);
  }
};

}  // namespace husky
