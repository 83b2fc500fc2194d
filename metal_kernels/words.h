// 16-bit and float data in aligned loads of up to 16 bytes, widened to float where it is used.

template <int N> struct WordVector { typedef vec<uint, N> type; };
template <> struct WordVector<1> { typedef uint type; };

// Elements in the widest aligned load, up to 16 bytes, that divides a lane's SHARE of a row.
template <typename T, int SHARE>
inline constexpr int load_elements() {
  return (SHARE & -SHARE) < 16 / int(sizeof(T)) ? (SHARE & -SHARE) : 16 / int(sizeof(T));
}

template <typename T>
inline void widen_word(uint word, thread float* out) {
  if constexpr (is_same_v<T, float>) {
    out[0] = as_type<float>(word);
  } else if constexpr (is_same_v<T, bfloat16_t>) {
    out[0] = as_type<float>(word << 16);
    out[1] = as_type<float>(word & 0xffff0000u);
  } else {
    const float2 pair = float2(as_type<half2>(word));
    out[0] = pair.x;
    out[1] = pair.y;
  }
}

template <typename T> inline void widen(uint words, thread float* out) {
  widen_word<T>(words, out);
}

template <typename T, int N>
inline void widen(vec<uint, N> words, thread float* out) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    widen_word<T>(words[i], out + i * (4 / int(sizeof(T))));
  }
}

// Two values of a 16-bit T as they lie in memory, the first in the lower half.
template <typename T>
inline uint pair_word(float first, float second) {
  return uint(as_type<ushort>(T(first))) | uint(as_type<ushort>(T(second))) << 16;
}
