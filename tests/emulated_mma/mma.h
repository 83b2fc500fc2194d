// metal_kernels/mma.h without CUDA's instructions, so that gemv_mma.h runs in the emulator. The
// multiply is spelled out from the fragment layout in NVIDIA's PTX manual (mma.m16n8k16).
#include "words.h"

#define MSL_INPUTS_READY() true

inline vec<uint, 4> load_once(const device uint* words) {
  return *reinterpret_cast<const device vec<uint, 4>*>(words);
}

inline vec<uint, 4> load_shared_words(const device uint* words) {
  return *reinterpret_cast<const device vec<uint, 4>*>(words);
}

inline uint masked_or(uint word, uint mask, uint bits) {
  return (word & mask) | bits;
}

inline uint low_halves(uint a, uint b) {
  return (a & 0xffffu) | (b << 16);
}

inline uint high_halves(uint a, uint b) {
  return (a >> 16) | (b & 0xffff0000u);
}

// Of both multiplies: in turn t of four the words of rows g and g + 8 of a that this lane needs, and
// of one column of b.
struct MmaRowWords { uint of[2][2]; };
struct MmaColumnWords { uint of[2]; };

inline MmaRowWords mma_rows(uint lane, uint t, uint a0, uint a1, uint a2, uint a3) {
  const ushort row = ushort(lane / 4 * 4 + t);
  return {{
      {simd_shuffle(a0, row), simd_shuffle(a2, row)},
      {simd_shuffle(a1, row), simd_shuffle(a3, row)}}};
}

inline MmaColumnWords mma_column(uint lane, uint t, uint c, uint b0, uint b1) {
  const ushort column = ushort((lane % 4 * 2 + c) * 4 + t);
  return {{simd_shuffle(b0, column), simd_shuffle(b1, column)}};
}

template <typename T>
inline void mma(thread float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  const uint lane = simd_prefix_exclusive_sum(1u);
  for (uint t = 0; t < 4; t++) {
    const MmaRowWords a = mma_rows(lane, t, a0, a1, a2, a3);
    for (uint c = 0; c < 2; c++) {
      const MmaColumnWords b = mma_column(lane, t, c, b0, b1);
      for (uint r = 0; r < 2; r++) {
        for (uint i = 0; i < 2; i++) {
          float left[2];
          float right[2];
          widen_word<T>(a.of[r][i], left);
          widen_word<T>(b.of[i], right);
          d[2 * r + c] += left[0] * right[0] + left[1] * right[1];
        }
      }
    }
  }
}
