// metal_kernels/mma_integer.h without CUDA's instructions, so that gemv_integer.h runs in the
// emulator. The multiply is spelled out from the fragment layout in NVIDIA's PTX manual
// (mma.m16n8k32, 8-bit integers).
#include "mma.h"

inline uint permute_bytes(uint a, uint b, uint choice) {
  const ulong both = ulong(a) | ulong(b) << 32;
  uint result = 0;
  for (uint i = 0; i < 4; i++) {
    result |= uint(both >> ((choice >> (4 * i) & 7u) * 8) & 0xffu) << (8 * i);
  }
  return result;
}

inline void mma_integer(thread int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  const uint lane = simd_prefix_exclusive_sum(1u);
  for (uint t = 0; t < 4; t++) {
    const MmaRowWords a = mma_rows(lane, t, a0, a1, a2, a3);
    for (uint c = 0; c < 2; c++) {
      const MmaColumnWords b = mma_column(lane, t, c, b0, b1);
      for (uint r = 0; r < 2; r++) {
        for (uint i = 0; i < 8; i++) {
          const int left = int(a.of[r][i / 4] >> (i % 4 * 8) & 0xffu);
          const int right = int(b.of[i / 4] >> (i % 4 * 8) & 0xffu);
          d[2 * r + c] += left * (right < 128 ? right : right - 256);
        }
      }
    }
  }
}

inline void mma_integer_first(
    thread int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  for (uint i = 0; i < 4; i++) {
    d[i] = 0;
  }
  mma_integer(d, a0, a1, a2, a3, b0, b1);
}
