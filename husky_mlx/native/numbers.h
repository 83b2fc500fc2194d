// The floating-point types of MLX's arrays, to and from vectors of float.
#pragma once

#include "lanes.h"

namespace husky {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// The type of what is not there: a bias, a norm's weights.
struct None {};

using Shorts = Vector<uint16_t, LANES>;

namespace detail {

inline Floats from_bits(Shorts stored, BFloat) {
  return bits_as<Floats>(convert<Words>(stored) << 16);
}

inline Shorts to_bits(Floats v, BFloat) {
  const Words bits = bits_as<Words>(v);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  // Rounding may not carry a NaN over into a number.
  const Words quiet = bits >> 16 | 0x40u;
  return convert<Shorts>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

#if HUSKY_AVX512
inline Floats from_bits(Shorts stored, Half) { return (Floats)_mm512_cvtph_ps((__m256i)stored); }
inline Shorts to_bits(Floats v, Half) { return (Shorts)_mm512_cvtps_ph((__m512)v, 0); }
#elif defined(__F16C__) && defined(__AVX__)
inline Floats from_bits(Shorts stored, Half) { return (Floats)_mm256_cvtph_ps((__m128i)stored); }
inline Shorts to_bits(Floats v, Half) { return (Shorts)_mm256_cvtps_ph((__m256)v, 0); }
#else
inline Floats from_bits(Shorts stored, Half) {
  const Words half = convert<Words>(stored);
  const Words magnitude = (half & 0x7fffu) << 13;
  // Times 2^112 moves the exponent's bias from 15 to 127, and makes subnormals normal.
  Words bits = bits_as<Words>(bits_as<Floats>(magnitude) * 0x1p112f);
  bits |= magnitude >= (0x7c00u << 13) ? splat(0x7f800000u) : Words{};
  return bits_as<Floats>(bits | (half & 0x8000u) << 16);
}

inline Shorts to_bits(Floats v, Half) {
  const Words bits = bits_as<Words>(v);
  const Words magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // Adding 0.5 leaves a half's subnormal, rounded, in the low bits.
  const Words tiny =
      bits_as<Words>(bits_as<Floats>(magnitude) + 0.5f) - bits_as<Words>(splat(0.5f));
  Words result = magnitude < (113u << 23) ? tiny : normal;
  result = magnitude >= 0x47800000u ? splat(0x7c00u) : result;
  result = magnitude > 0x7f800000u ? splat(0x7e00u) : result;
  return convert<Shorts>(result | (bits >> 16 & 0x8000u));
}
#endif

}  // namespace detail

inline Floats load_floats(const float* from) { return load<Floats>(from); }
inline void store_floats(float* to, Floats v) { store(to, v); }
inline Floats load_floats(const float* from, int count) {
  return load_some<Floats>(from, count * (int)sizeof(float));
}
inline void store_floats(float* to, Floats v, int count) {
  std::memcpy(to, &v, count * sizeof(float));
}

template <typename T>
inline Floats load_floats(const T* from) {
  return detail::from_bits(load<Shorts>(from), T{});
}
template <typename T>
inline Floats load_floats(const T* from, int count) {
  return detail::from_bits(load_some<Shorts>(from, count * (int)sizeof(T)), T{});
}
template <typename T>
inline void store_floats(T* to, Floats v) {
  store(to, detail::to_bits(v, T{}));
}
template <typename T>
inline void store_floats(T* to, Floats v, int count) {
  const Shorts bits = detail::to_bits(v, T{});
  std::memcpy(to, &bits, count * sizeof(T));
}

// f(first element, number of elements): whole vectors, then what is left.
template <typename F>
inline void in_vectors(int count, F f) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) f(i, LANES);
  if (i < count) f(i, count - i);
}

// e^x, within 2 units in the last place; 0 below -87, and constant above 88.
inline Floats exponential(Floats x) {
  Floats bounded = x < -87.0f ? splat(-87.0f) : x;  // a NaN stays one
  bounded = bounded > 88.0f ? splat(88.0f) : bounded;
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;  // its low bits are the whole number
  const Floats whole = shifted - 12582912.0f;
  const Floats r = bounded - whole * 0.693359375f - whole * -2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Words power = (bits_as<Words>(shifted) - 0x4b400000u + 127u) << 23;
  return x < -87.0f ? Floats{} : p * bits_as<Floats>(power);
}

}  // namespace husky
