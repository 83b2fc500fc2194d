// Metal's math functions on float, half, bfloat and their vectors, in metal::, metal::fast:: and
// metal::precise::. Shared by the CUDA prelude and the emulator.
//
// Needs before it: HUSKY_LIBM(name), which turns exp into the platform's float function, and
// HUSKY_FAST(name) for the functions that metal::fast may answer less exactly.
#pragma once

namespace metal {

#define HUSKY_UNARY(name, expression)                                              \
  HUSKY_FUNC float name(float x) { return expression; }                            \
  template <class F> HUSKY_FUNC SmallFloat<F> name(SmallFloat<F> value) {          \
    return SmallFloat<F>(name(static_cast<float>(value)));                         \
  }                                                                                \
  template <class T, int N> HUSKY_FUNC vec<T, N> name(vec<T, N> v) {               \
    for (int i = 0; i < N; i++) v[i] = name(v[i]);                                 \
    return v;                                                                      \
  }
#define HUSKY_BINARY(name, expression)                                             \
  HUSKY_FUNC float name(float x, float y) { return expression; }                   \
  template <class F>                                                               \
  HUSKY_FUNC SmallFloat<F> name(SmallFloat<F> a, SmallFloat<F> b) {                \
    return SmallFloat<F>(name(static_cast<float>(a), static_cast<float>(b)));      \
  }                                                                                \
  template <class T, int N> HUSKY_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {  \
    for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]);                           \
    return a;                                                                      \
  }

// The functions whose fast and precise forms may differ.
#define HUSKY_TRANSCENDENTALS(FORM)                    \
  HUSKY_UNARY(exp, FORM(exp)(x))                       \
  HUSKY_UNARY(log, FORM(log)(x))                       \
  HUSKY_UNARY(log2, FORM(log2)(x))                     \
  HUSKY_UNARY(sin, FORM(sin)(x))                       \
  HUSKY_UNARY(cos, FORM(cos)(x))                       \
  HUSKY_UNARY(exp2, HUSKY_LIBM(exp2)(x))               \
  HUSKY_UNARY(log10, HUSKY_LIBM(log10)(x))             \
  HUSKY_UNARY(tan, HUSKY_LIBM(tan)(x))                 \
  HUSKY_UNARY(atan, HUSKY_LIBM(atan)(x))               \
  HUSKY_UNARY(sinh, HUSKY_LIBM(sinh)(x))               \
  HUSKY_UNARY(cosh, HUSKY_LIBM(cosh)(x))               \
  HUSKY_UNARY(tanh, HUSKY_LIBM(tanh)(x))               \
  HUSKY_UNARY(sqrt, HUSKY_LIBM(sqrt)(x))               \
  HUSKY_UNARY(rsqrt, HUSKY_RSQRT(x))                   \
  HUSKY_BINARY(pow, HUSKY_LIBM(pow)(x, y))             \
  HUSKY_BINARY(atan2, HUSKY_LIBM(atan2)(x, y))         \
  HUSKY_BINARY(divide, x / y)

HUSKY_TRANSCENDENTALS(HUSKY_LIBM)
namespace precise {
HUSKY_TRANSCENDENTALS(HUSKY_LIBM)
}
namespace fast {
HUSKY_TRANSCENDENTALS(HUSKY_FAST)
}

HUSKY_UNARY(fabs, HUSKY_LIBM(fabs)(x))
HUSKY_UNARY(abs, HUSKY_LIBM(fabs)(x))
HUSKY_UNARY(floor, HUSKY_LIBM(floor)(x))
HUSKY_UNARY(ceil, HUSKY_LIBM(ceil)(x))
HUSKY_UNARY(round, HUSKY_LIBM(round)(x))
HUSKY_UNARY(rint, HUSKY_LIBM(rint)(x))
HUSKY_UNARY(trunc, HUSKY_LIBM(trunc)(x))
HUSKY_UNARY(fract, x - HUSKY_LIBM(floor)(x))
HUSKY_UNARY(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
HUSKY_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
HUSKY_BINARY(fmin, HUSKY_LIBM(fmin)(x, y))
HUSKY_BINARY(fmax, HUSKY_LIBM(fmax)(x, y))
HUSKY_BINARY(min, HUSKY_LIBM(fmin)(x, y))
HUSKY_BINARY(max, HUSKY_LIBM(fmax)(x, y))
HUSKY_BINARY(fmod, HUSKY_LIBM(fmod)(x, y))
HUSKY_BINARY(copysign, HUSKY_LIBM(copysign)(x, y))
#undef HUSKY_TRANSCENDENTALS
#undef HUSKY_UNARY
#undef HUSKY_BINARY

// One overload per integer type, as in Metal: max(1, 2.0f) stays ambiguous there and here.
#define HUSKY_INTEGER_FUNCTIONS(T)                                     \
  HUSKY_FUNC T min(T a, T b) { return b < a ? b : a; }                 \
  HUSKY_FUNC T max(T a, T b) { return a < b ? b : a; }                 \
  HUSKY_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
HUSKY_INTEGER_FUNCTIONS(int)
HUSKY_INTEGER_FUNCTIONS(uint)
HUSKY_INTEGER_FUNCTIONS(short)
HUSKY_INTEGER_FUNCTIONS(ushort)
HUSKY_INTEGER_FUNCTIONS(char)
HUSKY_INTEGER_FUNCTIONS(uchar)
HUSKY_INTEGER_FUNCTIONS(long)
HUSKY_INTEGER_FUNCTIONS(ulong)
#undef HUSKY_INTEGER_FUNCTIONS
HUSKY_FUNC int abs(int x) { return x < 0 ? -x : x; }
HUSKY_FUNC long abs(long x) { return x < 0 ? -x : x; }
HUSKY_FUNC float clamp(float x, float low, float high) { return min(max(x, low), high); }
template <class F>
HUSKY_FUNC SmallFloat<F> clamp(SmallFloat<F> x, SmallFloat<F> low, SmallFloat<F> high) {
  return min(max(x, low), high);
}
template <class T, int N>
HUSKY_FUNC vec<T, N> clamp(vec<T, N> v, type_identity_t<T> low, type_identity_t<T> high) {
  return min(max(v, vec<T, N>(low)), vec<T, N>(high));
}

HUSKY_FUNC float fma(float a, float b, float c) { return HUSKY_LIBM(fma)(a, b, c); }
template <class F>
HUSKY_FUNC SmallFloat<F> fma(SmallFloat<F> a, SmallFloat<F> b, SmallFloat<F> c) {
  return SmallFloat<F>(fma(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)));
}
template <class T, int N>
HUSKY_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) c[i] = fma(a[i], b[i], c[i]);
  return c;
}

HUSKY_FUNC bool isnan(float x) { return x != x; }
HUSKY_FUNC bool isinf(float x) { return HUSKY_LIBM(fabs)(x) == INFINITY; }
HUSKY_FUNC bool isfinite(float x) { return HUSKY_LIBM(fabs)(x) < INFINITY; }
template <class T> HUSKY_FUNC T mix(T a, T b, T t) { return static_cast<T>(a + (b - a) * t); }
template <class T> HUSKY_FUNC T select(T otherwise, T chosen, bool condition) {
  return condition ? chosen : otherwise;
}
template <class T, int N>
HUSKY_FUNC vec<T, N> select(vec<T, N> otherwise, vec<T, N> chosen, vec<bool, N> condition) {
  for (int i = 0; i < N; i++) chosen[i] = condition[i] ? chosen[i] : otherwise[i];
  return chosen;
}

}  // namespace metal
