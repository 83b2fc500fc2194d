// The CUDA instructions that attention_mma.h is written in, beyond those of mma.h.
#include "mma.h"

// Two values rounded to T in one word, the first in its low half.
template <typename T>
inline uint pack_pair(float low, float high) {
  uint result;
  if constexpr (is_same_v<T, bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// 16 bytes that are read once, past the first cache. Not by the way for constants: a row that this
// launch has appended may be among them.
inline vec<uint, 4> load_streamed(const device uint* words) {
  uint a, b, c, d;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(words));
  return vec<uint, 4>(a, b, c, d);
}

// One instruction; exp2 has four, for results below 1e-38, which are 0 here.
inline float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
