// The instructions that gemv_integer.h is written in, beyond those of mma.h.
#include "mma.h"

// Four bytes chosen from those of a (0 to 3) and b (4 to 7), the lowest by the lowest nibble.
inline uint permute_bytes(uint a, uint b, uint choice) {
  uint result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(choice));
  return result;
}

// d (16x8, int32) += a (16x32, unsigned bytes) b (32x8, signed bytes), four in a register. With
// g = lane / 4 and t = lane % 4: a0, a2 are of row g and a1, a3 of row g + 8; a0, a1 meet b0 and a2,
// a3 meet b1; b0, b1 are of column g. d[0], d[1] are of row g, columns 2t and 2t + 1; d[2], d[3] of
// row g + 8.
inline void mma_integer(thread int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same into zeros, which then take no registers.
inline void mma_integer_first(
    thread int* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
