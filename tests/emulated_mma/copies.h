// metal_kernels/copies.h without CUDA's instructions: a copy is there at once, so that whether it is
// waited for does not show here.

template <int BYTES>
inline void copy_ahead(threadgroup uint* out, const device void* from, bool live) {
  const device uint* words = reinterpret_cast<const device uint*>(from);
  for (int i = 0; i < BYTES / 4; i++) {
    out[i] = live ? words[i] : 0u;
  }
}

inline void end_copies() {}

template <int LEFT>
inline void wait_for_copies() {}
