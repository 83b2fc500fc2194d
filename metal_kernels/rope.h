// Rotary embedding of four pairs in eight values: (0, 4) to (3, 7), or with TRADITIONAL neighbours.
// MAGNITUDE_BITS: a float32 as an integer, which multiplies them.
template <bool TRADITIONAL, int MAGNITUDE_BITS>
inline void rotate_four(thread float* values, const device float* frequencies, float position) {
  const float magnitude = as_type<float>(MAGNITUDE_BITS);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int first = TRADITIONAL ? 2 * i : i;
    const int second = TRADITIONAL ? first + 1 : i + 4;
    const float angle = position * frequencies[i];
    const float cosine = metal::precise::cos(angle) * magnitude;
    const float sine = metal::precise::sin(angle) * magnitude;
    const float x = values[first];
    const float y = values[second];
    values[first] = x * cosine - y * sine;
    values[second] = x * sine + y * cosine;
  }
}

// Where the eight values of quad `quad` of a head lie, as two vectors of four of its D.
template <int D, bool TRADITIONAL>
inline int left_four(int quad) {
  return TRADITIONAL ? 2 * quad : quad;
}
template <int D, bool TRADITIONAL>
inline int right_four(int quad) {
  return TRADITIONAL ? 2 * quad + 1 : quad + D / 8;
}

template <typename T, int D, bool TRADITIONAL>
inline void load_quad(const device T* head, int quad, thread float* values) {
  typedef vec<T, 4> Four;
  const Four left = reinterpret_cast<const device Four*>(head)[left_four<D, TRADITIONAL>(quad)];
  const Four right = reinterpret_cast<const device Four*>(head)[right_four<D, TRADITIONAL>(quad)];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    values[i] = float(left[i]);
    values[4 + i] = float(right[i]);
  }
}

template <typename T, int D, bool TRADITIONAL>
inline void store_quad(const thread float* values, int quad, device T* head) {
  typedef vec<T, 4> Four;
  Four left;
  Four right;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    left[i] = T(values[i]);
    right[i] = T(values[4 + i]);
  }
  reinterpret_cast<device Four*>(head)[left_four<D, TRADITIONAL>(quad)] = left;
  reinterpret_cast<device Four*>(head)[right_four<D, TRADITIONAL>(quad)] = right;
}
