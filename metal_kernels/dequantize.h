// Weights as they are packed, 8 bytes a lane, against x in float32: for any platform.
//
// 4 and 8 bit: MLX's affine layout, uint32 words with the first value in the lowest bits. The words
// are read as ushorts and a value is used where it stands: masked, never shifted, with x scaled down
// beforehand by the power of two that the place stands for (exact in float32).
// 16: not quantized, four values of type T.
#include "words.h"

template <typename T, int BITS>
struct Packed {
  typedef vec<ushort, 4> Words;
  static constant constexpr int VALUES = 64 / BITS;
};
template <typename T>
struct Packed<T, 16> {
  typedef vec<uint, int(sizeof(T))> Words;
  static constant constexpr int VALUES = 4;
};

// x for one lane's words, and its sum for the bias that a group's values share.
template <int VALUES>
struct Prepared {
  float x[VALUES];
  float sum;
};

template <int BITS, int VALUES>
inline void prepare(thread Prepared<VALUES>& prepared) {
  prepared.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    prepared.sum += prepared.x[i];
    if (BITS < 16) {
      prepared.x[i] *= 1.0f / float(1 << (i * BITS % 16));
    }
  }
}

template <typename T, int BITS>
inline float dot_words(
    typename Packed<T, BITS>::Words words, const thread Prepared<Packed<T, BITS>::VALUES>& prepared) {
  constexpr int VALUES = Packed<T, BITS>::VALUES;
  float sum = 0.0f;
  if constexpr (BITS == 16) {
    float values[VALUES];
    widen<T>(words, values);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      sum += prepared.x[i] * values[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      const uint word = words[i * BITS / 16];
      sum += prepared.x[i] * float(word & (((1u << BITS) - 1) << (i * BITS % 16)));
    }
  }
  return sum;
}
