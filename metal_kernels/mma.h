// The CUDA instructions that gemv_mma.h is written in.

// 16 bytes that are read once: past the first cache, so that x and the scales stay there. Volatile
// keeps the loads where they are written, ahead of the barriers and the work that hide them.
inline vec<uint, 4> load_once(const device uint* words) {
  uint a, b, c, d;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(words));
  return vec<uint, 4>(a, b, c, d);
}

// 16 bytes that other threads of the multiprocessor read as well.
inline vec<uint, 4> load_shared_words(const device uint* words) {
  uint a, b, c, d;
  MSL_SHARED_ASM("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(words));
  return vec<uint, 4>(a, b, c, d);
}

// (word & mask) | bits, one instruction: left to itself the compiler makes two, for two immediates.
inline uint masked_or(uint word, uint mask, uint bits) {
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}

// The low halves of two words in one, and the high halves.
inline uint low_halves(uint a, uint b) {
  uint result;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
inline uint high_halves(uint a, uint b) {
  uint result;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// d (16x8, float32) += a (16x16) b (16x8), two values of T in a register. With g = lane / 4 and
// t = lane % 4: a0, a2 are of row g and a1, a3 of row g + 8; a0, a1 meet b0 and a2, a3 meet b1;
// b0, b1 are of column g. d[0], d[1] are of row g, columns 2t and 2t + 1; d[2], d[3] of row g + 8.
template <typename T>
inline void mma(thread float* d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  if constexpr (is_same_v<T, bfloat16_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
