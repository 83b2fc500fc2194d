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

// One instruction; exp2 has four, for results below 1e-38, which are 0 here.
inline float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
