// The type vocabulary of the Metal Shading Language that plain C++ lacks: type traits, fixed-width
// names, and 16-bit floats as classes. Shared by the CUDA prelude and the emulator, so that a body
// which relies on anything else fails on both.
//
// Needs before it: HUSKY_FUNC (function qualifiers), INFINITY, NAN and, in namespace metal, the two
// formats Float16Format and Bfloat16Format, each with implicit_from_float and
//   static unsigned short encode(float);   static float decode(unsigned short);
#pragma once

namespace metal {

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using size_t = decltype(sizeof(0));

template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <bool Condition, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool Condition, class T = void>
using enable_if_t = typename enable_if<Condition, T>::type;
template <bool Condition, class Yes, class No> struct conditional { using type = Yes; };
template <class Yes, class No> struct conditional<false, Yes, No> { using type = No; };
template <bool Condition, class Yes, class No>
using conditional_t = typename conditional<Condition, Yes, No>::type;
// In a parameter, keeps T from being deduced from that argument.
template <class T> struct type_identity { using type = T; };
template <class T> using type_identity_t = typename type_identity<T>::type;
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;

template <class T> inline constexpr bool is_integral_v =
    is_same_v<T, bool> || is_same_v<T, char> || is_same_v<T, signed char> || is_same_v<T, uchar> ||
    is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, int> || is_same_v<T, uint> ||
    is_same_v<T, long> || is_same_v<T, ulong> || is_same_v<T, long long> ||
    is_same_v<T, unsigned long long>;

// Arithmetic happens in float and is rounded after every operation, which for + - * / is the
// correctly rounded 16-bit result. As in Metal: half converts from float implicitly, bfloat only
// explicitly; with an integer the result stays 16-bit, with a float it is float.
template <class Format>
struct SmallFloat {
  unsigned short bits;

  SmallFloat() = default;
  template <class S, enable_if_t<is_same_v<S, float> && Format::implicit_from_float, int> = 0>
  HUSKY_FUNC constexpr SmallFloat(S value) : bits(Format::encode(value)) {}
  template <class S, enable_if_t<is_same_v<S, float> && !Format::implicit_from_float, int> = 0>
  HUSKY_FUNC constexpr explicit SmallFloat(S value) : bits(Format::encode(value)) {}
  template <class S, enable_if_t<is_integral_v<S>, long> = 0>
  HUSKY_FUNC constexpr SmallFloat(S value) : bits(Format::encode(static_cast<float>(value))) {}
  template <class Other>
  HUSKY_FUNC constexpr explicit SmallFloat(SmallFloat<Other> value)
      : bits(Format::encode(static_cast<float>(value))) {}

  HUSKY_FUNC constexpr operator float() const { return Format::decode(bits); }
  HUSKY_FUNC constexpr SmallFloat operator-() const {
    return SmallFloat(-static_cast<float>(*this));
  }
};

using half = SmallFloat<Float16Format>;
using bfloat = SmallFloat<Bfloat16Format>;
using float16_t = half;
using bfloat16_t = bfloat;

template <class T> inline constexpr bool is_small_float_v = false;
template <class Format> inline constexpr bool is_small_float_v<SmallFloat<Format>> = true;
template <class T> inline constexpr bool is_floating_point_v =
    is_same_v<T, float> || is_small_float_v<T>;
template <class T> inline constexpr bool is_arithmetic_v =
    is_integral_v<T> || is_floating_point_v<T>;

// The type of (16-bit float) op (scalar): float beside a float, otherwise 16-bit.
template <class Small, class Scalar>
using WithScalar = enable_if_t<is_integral_v<Scalar> || is_same_v<Scalar, float>,
                               conditional_t<is_same_v<Scalar, float>, float, Small>>;

#define HUSKY_ARITHMETIC(op)                                                                      \
  template <class F>                                                                              \
  HUSKY_FUNC constexpr SmallFloat<F> operator op(SmallFloat<F> a, SmallFloat<F> b) {              \
    return SmallFloat<F>(static_cast<float>(a) op static_cast<float>(b));                         \
  }                                                                                               \
  template <class F, class S>                                                                     \
  HUSKY_FUNC constexpr WithScalar<SmallFloat<F>, S> operator op(SmallFloat<F> a, S b) {           \
    using Result = WithScalar<SmallFloat<F>, S>;                                                  \
    return Result(static_cast<float>(Result(a)) op static_cast<float>(Result(b)));                \
  }                                                                                               \
  template <class F, class S>                                                                     \
  HUSKY_FUNC constexpr WithScalar<SmallFloat<F>, S> operator op(S a, SmallFloat<F> b) {           \
    using Result = WithScalar<SmallFloat<F>, S>;                                                  \
    return Result(static_cast<float>(Result(a)) op static_cast<float>(Result(b)));                \
  }                                                                                               \
  template <class F, class S>                                                                     \
  HUSKY_FUNC constexpr SmallFloat<F>& operator op##=(SmallFloat<F>& a, S b) {                     \
    return a = SmallFloat<F>(static_cast<float>(a op b));                                         \
  }
HUSKY_ARITHMETIC(+)
HUSKY_ARITHMETIC(-)
HUSKY_ARITHMETIC(*)
HUSKY_ARITHMETIC(/)
#undef HUSKY_ARITHMETIC

#define HUSKY_COMPARISON(op)                                                                      \
  template <class F>                                                                              \
  HUSKY_FUNC constexpr bool operator op(SmallFloat<F> a, SmallFloat<F> b) {                       \
    return static_cast<float>(a) op static_cast<float>(b);                                        \
  }                                                                                               \
  template <class F, class S, class = WithScalar<SmallFloat<F>, S>>                               \
  HUSKY_FUNC constexpr bool operator op(SmallFloat<F> a, S b) {                                   \
    return static_cast<float>(a) op static_cast<float>(b);                                        \
  }                                                                                               \
  template <class F, class S, class = WithScalar<SmallFloat<F>, S>>                               \
  HUSKY_FUNC constexpr bool operator op(S a, SmallFloat<F> b) {                                   \
    return static_cast<float>(a) op static_cast<float>(b);                                        \
  }
HUSKY_COMPARISON(<)
HUSKY_COMPARISON(>)
HUSKY_COMPARISON(<=)
HUSKY_COMPARISON(>=)
HUSKY_COMPARISON(==)
HUSKY_COMPARISON(!=)
#undef HUSKY_COMPARISON

template <class To, class From>
HUSKY_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the two types differ in size");
  union Bits {
    From from;
    To to;
    HUSKY_FUNC Bits() {}
  } bits;
  bits.from = value;
  return bits.to;
}

template <class T> struct numeric_limits;
#define HUSKY_INTEGER_LIMITS(T, low, high)                     \
  template <> struct numeric_limits<T> {                       \
    static HUSKY_FUNC constexpr T min() { return low; }        \
    static HUSKY_FUNC constexpr T lowest() { return low; }     \
    static HUSKY_FUNC constexpr T max() { return high; }       \
  };
HUSKY_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
HUSKY_INTEGER_LIMITS(uint, 0u, 4294967295u)
HUSKY_INTEGER_LIMITS(short, -32768, 32767)
HUSKY_INTEGER_LIMITS(ushort, 0, 65535)
HUSKY_INTEGER_LIMITS(uchar, 0, 255)
#undef HUSKY_INTEGER_LIMITS
#define HUSKY_FLOAT_LIMITS(T, smallest, largest, step)            \
  template <> struct numeric_limits<T> {                          \
    static HUSKY_FUNC T min() { return T(smallest); }             \
    static HUSKY_FUNC T lowest() { return T(-largest); }          \
    static HUSKY_FUNC T max() { return T(largest); }              \
    static HUSKY_FUNC T epsilon() { return T(step); }             \
    static HUSKY_FUNC T infinity() { return T(float(INFINITY)); } \
  };
HUSKY_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f)
HUSKY_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
HUSKY_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.38953139e38f, 7.8125e-3f)
#undef HUSKY_FLOAT_LIMITS

}  // namespace metal

#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define METAL_FUNC HUSKY_FUNC
