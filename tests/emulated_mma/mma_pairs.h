// metal_kernels/mma_pairs.h without CUDA's instructions, so that attention_mma.h runs in the
// emulator.
#include "mma.h"

inline vec<uint, 4> load_streamed(const device uint* words) {
  return *reinterpret_cast<const device vec<uint, 4>*>(words);
}

template <typename T>
inline uint pack_pair(float low, float high) {
  return as_type<uint>(vec<T, 2>(T(low), T(high)));
}

inline float exp2_flushed(float x) {
  return metal::exp2(x);
}
