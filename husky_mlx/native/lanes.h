// Vectors as wide as the machine's, in the compiler's own vector types: the same arithmetic for
// every CPU. Where a CPU has an instruction that no operator names, it stands here and nowhere
// else.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace husky {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HUSKY_AVX512 1
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

template <typename T, int COUNT>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * COUNT)));
};
template <typename T, int COUNT>
using Vector = typename VectorOf<T, COUNT>::type;

using Floats = Vector<float, LANES>;
using Ints = Vector<int32_t, LANES>;
using Words = Vector<uint32_t, LANES>;

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

template <typename V>
inline V load(const void* from) {
  V result;
  std::memcpy(&result, from, sizeof(V));
  return result;
}

template <typename V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// The first `bytes` of a vector, at least one, with zeros behind: nothing else is read.
template <typename V>
inline V load_some(const void* from, int bytes) {
#if HUSKY_AVX512
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), from);
#endif
  V result{};
  std::memcpy(&result, from, bytes);
  return result;
}

template <typename To, typename From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline Floats splat(float value) { return value - Floats{}; }
inline Ints splat(int32_t value) { return value - Ints{}; }
inline Words splat(uint32_t value) { return value - Words{}; }

template <typename To, typename From>
inline To convert(From value) {
  return __builtin_convertvector(value, To);
}

template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

namespace shuffles {

template <int... I>
inline Words pick(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Words{I...});
#endif
}

template <int REPEAT, int FIRST, int... I>
inline Words spread(Words v, std::integer_sequence<int, I...>) {
  return pick<(FIRST + I / REPEAT)...>(v, v);
}

template <int STEP, int... I>
inline Words lower_of_pair(Words a, Words b, std::integer_sequence<int, I...>) {
  return pick<(I & STEP ? LANES + (I - STEP) : I)...>(a, b);
}

template <int STEP, int... I>
inline Words upper_of_pair(Words a, Words b, std::integer_sequence<int, I...>) {
  return pick<(I & STEP ? LANES + I : I + STEP)...>(a, b);
}

template <int STEP>
inline void transpose_step(Words* rows) {
  using Lanes = std::make_integer_sequence<int, LANES>;
  for (int i = 0; i < LANES; ++i) {
    if (i & STEP) continue;
    const Words a = rows[i], b = rows[i + STEP];
    rows[i] = lower_of_pair<STEP>(a, b, Lanes{});
    rows[i + STEP] = upper_of_pair<STEP>(a, b, Lanes{});
  }
  if constexpr (STEP > 1) transpose_step<STEP / 2>(rows);
}

template <int STEP>
inline void fold(Floats* rows) {
  using Lanes = std::make_integer_sequence<int, LANES>;
  for (int i = 0; i < STEP; ++i) {
    const Words a = bits_as<Words>(rows[i]), b = bits_as<Words>(rows[i + STEP]);
    rows[i] = bits_as<Floats>(lower_of_pair<STEP>(a, b, Lanes{})) +
              bits_as<Floats>(upper_of_pair<STEP>(a, b, Lanes{}));
  }
  if constexpr (STEP > 1) fold<STEP / 2>(rows);
}

}  // namespace shuffles

// Lane i is v[FIRST + i / REPEAT].
template <int REPEAT, int FIRST = 0>
inline Floats spread(Floats v) {
  using Lanes = std::make_integer_sequence<int, LANES>;
  return bits_as<Floats>(shuffles::spread<REPEAT, FIRST>(bits_as<Words>(v), Lanes{}));
}

// LANES rows of LANES words, in place.
inline void transpose(Words* rows) { shuffles::transpose_step<LANES / 2>(rows); }

// Lane i is the sum of rows[i]'s lanes; the rows are overwritten.
inline Floats sums_of_rows(Floats* rows) {
  shuffles::fold<LANES / 2>(rows);
  return rows[0];
}

namespace shuffles {

template <int STEP, typename V, typename F, int... I>
inline V reduce(V v, F f, std::integer_sequence<int, I...> lanes) {
  v = f(v, bits_as<V>(pick<((I + STEP) % LANES)...>(bits_as<Words>(v), bits_as<Words>(v))));
  if constexpr (STEP > 1) return reduce<STEP / 2>(v, f, lanes);
  return v;
}

}  // namespace shuffles

// All lanes by an operation of two, in every lane of the result.
template <typename V, typename F>
inline V reduce(V v, F f) {
  return shuffles::reduce<LANES / 2>(v, f, std::make_integer_sequence<int, LANES>{});
}

inline float sum(Floats v) {
  return reduce(v, [](Floats a, Floats b) { return a + b; })[0];
}
inline int32_t sum(Ints v) {
  return reduce(v, [](Ints a, Ints b) { return a + b; })[0];
}

#if defined(__ARM_FEATURE_DOTPROD)
// As dot4, half of a vector's lanes.
template <int BITS>
inline int32x4_t dot4_half(int32x4_t total, uint8x16_t weights, int8x16_t activations) {
  // Codes of 4 bits are the same numbers with a sign.
  if constexpr (BITS == 4) return vdotq_s32(total, vreinterpretq_s8_u8(weights), activations);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(total, weights, activations);
#else
  // w = (w - 128) + 64 + 64.
  const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(weights, vdupq_n_u8(128)));
  const int8x16_t half = vdupq_n_s8(64);
  total = vdotq_s32(total, centred, activations);
  return vdotq_s32(vdotq_s32(total, half, activations), half, activations);
#endif
}
#endif

// Each lane holds four bytes: weights 0 to 2^BITS - 1 and activations -128 to 127. Adds their dot
// product, exactly.
template <int BITS>
inline Ints dot4(Ints total, Words weights, Words activations) {
#if HUSKY_AVX512 && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)activations);
#elif !HUSKY_AVX512 && defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, (__m256i)activations);
#elif defined(__ARM_FEATURE_DOTPROD)
  Ints result;
  for (int half = 0; half < 2; ++half) {
    const int at = half * 16;
    int32x4_t t;
    uint8x16_t w;
    int8x16_t x;
    std::memcpy(&t, reinterpret_cast<const char*>(&total) + at, 16);
    std::memcpy(&w, reinterpret_cast<const char*>(&weights) + at, 16);
    std::memcpy(&x, reinterpret_cast<const char*>(&activations) + at, 16);
    t = dot4_half<BITS>(t, w, x);
    std::memcpy(reinterpret_cast<char*>(&result) + at, &t, 16);
  }
  return result;
#else
#if HUSKY_AVX512
  // Pairs of 4 bit weights stay below 2^15; pairs of 8 bit ones would saturate.
  if constexpr (BITS == 4) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)activations);
    return total + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  const __m512i even = _mm512_and_si512((__m512i)weights, _mm512_set1_epi16(255));
  const __m512i odd = _mm512_srli_epi16((__m512i)weights, 8);
  const __m512i even_x = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)activations, 8), 8);
  const __m512i odd_x = _mm512_srai_epi16((__m512i)activations, 8);
  return total + (Ints)_mm512_madd_epi16(even, even_x) + (Ints)_mm512_madd_epi16(odd, odd_x);
#elif defined(__AVX2__)
  if constexpr (BITS == 4) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)activations);
    return total + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  const __m256i even = _mm256_and_si256((__m256i)weights, _mm256_set1_epi16(255));
  const __m256i odd = _mm256_srli_epi16((__m256i)weights, 8);
  const __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)activations, 8), 8);
  const __m256i odd_x = _mm256_srai_epi16((__m256i)activations, 8);
  return total + (Ints)_mm256_madd_epi16(even, even_x) + (Ints)_mm256_madd_epi16(odd, odd_x);
#else
  for (int byte = 0; byte < 4; ++byte) {
    const Ints w = (Ints)(weights >> (8 * byte) & 255u);
    total += w * ((Ints)(activations << (24 - 8 * byte)) >> 24);
  }
  return total;
#endif
#endif
}

}  // namespace husky
