// The constants of a kernel's matrix product in one buffer of uint32, as husky_mlx/layout.py joins
// them: weight (N, K) in T for BITS 16, else in MLX's affine words; then scales and biases
// (N, K / GROUP) unless BITS is 16, bias (N,) if HAS_BIAS, and what the kernel has besides, all in T.
// Every part begins at a multiple of 16 bytes.

// Where parts begin, in uint32.
struct Parts {
  size_t scales;
  size_t biases;
  size_t bias;
  size_t rest;
};

inline constexpr size_t part_words(size_t bytes) {
  return (bytes + 15) / 16 * 4;
}

template <typename T, int BITS, int GROUP, int N, int K, bool HAS_BIAS>
inline constexpr Parts parts() {
  Parts at = {0, 0, 0, 0};
  const size_t values = size_t(N) * K;
  const size_t grouped = BITS == 16 ? 0 : part_words(values / GROUP * sizeof(T));
  at.scales = part_words(BITS == 16 ? values * sizeof(T) : values * BITS / 8);
  at.biases = at.scales + grouped;
  at.bias = at.biases + grouped;
  at.rest = at.bias + (HAS_BIAS ? part_words(N * sizeof(T)) : 0);
  return at;
}

template <typename T>
inline const device T* part(const device uint* constants, size_t at) {
  return reinterpret_cast<const device T*>(constants + at);
}
