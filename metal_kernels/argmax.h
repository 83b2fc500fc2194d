// The largest of some values and where it stands; of equal ones the first, as mx.argmax has it.

struct Best {
  float value;
  uint index;
};

inline Best better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

// The best of 32 lanes, in all of them.
inline Best simd_best(Best best) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    Best other;
    other.value = simd_shuffle_xor(best.value, ushort(distance));
    other.index = simd_shuffle_xor(best.index, ushort(distance));
    best = better(best, other);
  }
  return best;
}
