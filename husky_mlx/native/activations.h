// The input of a matrix product: floats, and 16 bit integers with one scale for each 32 of them.
//
// x is replaced by scale * q with q = round(x / scale), scale = max|x| / 32512 over its group, so
// that |x - scale * q| <= scale / 2: an output is off by at most sum over groups of max|x| / 65024 *
// sum|w|, w being the group's weights, besides float rounding. q is kept as two bytes, 256 * high +
// low, because the instructions for dot products take bytes; with the high one alone a model of 135M
// parameters gives visibly other answers (SmolLM2, 2026-11). Both terms of an affine weight, code
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
  NATURAL = 1,  // the bytes in order, for 8 bit weights
  SPLIT = 2,    // in each block the even elements first: the low halves of 4 bit weights' bytes
};

template <int WIDTH>
struct Activations {
  static constexpr int GROUPS = WIDTH / GROUP;
  static constexpr int STRIDE = round_up(WIDTH, SPLIT_BLOCK);
  static constexpr int GROUP_STRIDE = round_up(GROUPS, LANES);

  float* values;
  int8_t* natural;  // the high bytes; the low ones are `low` further
  int8_t* split;
  int64_t low;
  float* scale;  // of each group
  float* sum;    // of each group's integers, times their scale

  static constexpr int64_t bytes(int tokens) {
    return (int64_t)tokens * (STRIDE * 8 + GROUP_STRIDE * 8);
  }

  // Over zeroed memory: what is behind the last group stays zero.
  Activations(char* memory, int tokens) {
    values = reinterpret_cast<float*>(memory);
    scale = values + (int64_t)tokens * STRIDE;
    sum = scale + (int64_t)tokens * GROUP_STRIDE;
    low = (int64_t)tokens * STRIDE;
    natural = reinterpret_cast<int8_t*>(sum + (int64_t)tokens * GROUP_STRIDE);
    split = natural + 2 * low;
  }

  float* row(int token) const { return values + (int64_t)token * STRIDE; }

  // Sets the integers of one group from its values; LAYOUTS is a set of layouts.
  template <int LAYOUTS>
  void quantise(int token, int group) const {
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
    // MOST / limit must be a number.
    const float inverse = limit < 1e-30f ? 0.0f : MOST / limit;
    const float step = limit < 1e-30f ? 0.0f : limit / MOST;
    Vector<int8_t, GROUP> high, lower;
    Ints total{};
    for (int i = 0; i < PARTS; ++i) {
      // The sum's low bits are the rounded integer.
      const Ints q = bits_as<Ints>(part[i] * inverse + 12582912.0f) - 0x4b400000;
      // Rounded, so that the low byte is signed too.
      const Ints above = (q + 128) >> 8;
      const auto first = convert<Vector<int8_t, LANES>>(above);
      const auto second = convert<Vector<int8_t, LANES>>(q - above * 256);
      store(reinterpret_cast<int8_t*>(&high) + i * LANES, first);
      store(reinterpret_cast<int8_t*>(&lower) + i * LANES, second);
      // Not q, which an infinity makes anything.
      total += convert<Ints>(first) * 256 + convert<Ints>(second);
    }
    const int64_t at = (int64_t)token * GROUP_STRIDE + group;
    scale[at] = step;
    sum[at] = step * (float)husky::sum(total);
    if constexpr (LAYOUTS & NATURAL) {
      int8_t* to = natural + (int64_t)token * STRIDE + group * GROUP;
      store(to, high);
      store(to + low, lower);
    }
    if constexpr (LAYOUTS & SPLIT) {
      constexpr int IN_BLOCK = SPLIT_BLOCK / GROUP;
      int8_t* to = split + (int64_t)token * STRIDE + group / IN_BLOCK * SPLIT_BLOCK;
      to += group % IN_BLOCK * (GROUP / 2);
      store_split(to, high);
      store_split(to + low, lower);
    }
  }

  template <int LAYOUTS>
  void quantise(int token) const {
    if constexpr (LAYOUTS != FLOATS)
      for (int group = 0; group < GROUPS; ++group) quantise<LAYOUTS>(token, group);
  }

 private:
  static constexpr float MOST = 127.0f * 256.0f;

  static void store_split(int8_t* to, Vector<int8_t, GROUP> bytes) {
    const auto pairs = bits_as<Vector<uint16_t, GROUP / 2>>(bytes);
    store(to, convert<Vector<uint8_t, GROUP / 2>>(pairs & (uint16_t)255));
    store(to + SPLIT_BLOCK / 2, convert<Vector<uint8_t, GROUP / 2>>(pairs >> 8));
  }
};

}  // namespace husky
