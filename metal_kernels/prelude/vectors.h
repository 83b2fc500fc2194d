// Metal's vectors as a class: vec<T, 2..4>, swizzles, the float4 family. Shared by the CUDA prelude
// and the emulator. On CUDA (HUSKY_CUDA) a vector is copied as one 4-, 8- or 16-byte word; its
// members one by one would be as many loads.
#pragma once

namespace metal {

template <class T, int N> struct vec;

// A selection of lanes that reads and writes like a vector; it shares the vector's storage. Vector
// is a parameter so that the vector's operators are looked up for a swizzle too.
template <class Vector, class T, int Stored, int... Lane>
struct Swizzle {
  T lanes[Stored];

  HUSKY_FUNC operator Vector() const { return Vector(lanes[Lane]...); }
  HUSKY_FUNC Swizzle& operator=(const Vector& value) {
    int i = 0;
    ((lanes[Lane] = value[i++]), ...);
    return *this;
  }
  HUSKY_FUNC Swizzle& operator=(const Swizzle& other) { return *this = Vector(other); }
  HUSKY_FUNC Swizzle& operator+=(const Vector& value) { return *this = Vector(*this) + value; }
  HUSKY_FUNC Swizzle& operator-=(const Vector& value) { return *this = Vector(*this) - value; }
  HUSKY_FUNC Swizzle& operator*=(const Vector& value) { return *this = Vector(*this) * value; }
};

#ifdef HUSKY_CUDA
template <int Bytes> struct CopyWord;
template <> struct CopyWord<1> { using type = uchar; };
template <> struct CopyWord<2> { using type = ushort; };
template <> struct CopyWord<4> { using type = uint; };
template <> struct CopyWord<8> { using type = ::uint2; };
template <> struct CopyWord<16> { using type = ::uint4; };
template <> struct CopyWord<32> { struct type { ::uint4 low, high; }; };
#define HUSKY_COPY_WORD(T, stored) typename CopyWord<sizeof(T) * stored>::type word;
#else
#define HUSKY_COPY_WORD(T, stored)
#endif

#define HUSKY_PAIR(stored, a, i, b, j) Swizzle<vec<T, 2>, T, stored, i, j> a##b;
#define HUSKY_PAIRS2(stored, a, i) HUSKY_PAIR(stored, a, i, x, 0) HUSKY_PAIR(stored, a, i, y, 1)
#define HUSKY_PAIRS3(stored, a, i) HUSKY_PAIRS2(stored, a, i) HUSKY_PAIR(stored, a, i, z, 2)
#define HUSKY_PAIRS4(stored, a, i) HUSKY_PAIRS3(stored, a, i) HUSKY_PAIR(stored, a, i, w, 3)

template <class T, int N> struct VectorStorage;
template <class T> struct alignas(2 * sizeof(T)) VectorStorage<T, 2> {
  union {
    T lanes[2];
    HUSKY_COPY_WORD(T, 2)
    struct { T x, y; };
    struct { T r, g; };
    HUSKY_PAIRS2(2, x, 0)
    HUSKY_PAIRS2(2, y, 1)
  };
  VectorStorage() = default;
};
// As in Metal, three lanes take the room of four.
template <class T> struct alignas(4 * sizeof(T)) VectorStorage<T, 3> {
  union {
    T lanes[4];
    HUSKY_COPY_WORD(T, 4)
    struct { T x, y, z; };
    struct { T r, g, b; };
    HUSKY_PAIRS3(4, x, 0)
    HUSKY_PAIRS3(4, y, 1)
    HUSKY_PAIRS3(4, z, 2)
    Swizzle<vec<T, 3>, T, 4, 0, 1, 2> xyz;
    Swizzle<vec<T, 3>, T, 4, 2, 1, 0> zyx;
  };
  VectorStorage() = default;
};
template <class T> struct alignas(4 * sizeof(T)) VectorStorage<T, 4> {
  union {
    T lanes[4];
    HUSKY_COPY_WORD(T, 4)
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    HUSKY_PAIRS4(4, x, 0)
    HUSKY_PAIRS4(4, y, 1)
    HUSKY_PAIRS4(4, z, 2)
    HUSKY_PAIRS4(4, w, 3)
    Swizzle<vec<T, 3>, T, 4, 0, 1, 2> xyz;
    Swizzle<vec<T, 3>, T, 4, 1, 2, 3> yzw;
    Swizzle<vec<T, 3>, T, 4, 2, 1, 0> zyx;
    Swizzle<vec<T, 4>, T, 4, 0, 1, 2, 3> xyzw;
    Swizzle<vec<T, 4>, T, 4, 3, 2, 1, 0> wzyx;
    Swizzle<vec<T, 4>, T, 4, 2, 3, 0, 1> zwxy;
    Swizzle<vec<T, 4>, T, 4, 1, 0, 3, 2> yxwz;
  };
  VectorStorage() = default;
};

// How many lanes a constructor argument brings.
template <class A> inline constexpr int lane_count_v = 1;
template <class T, int N> inline constexpr int lane_count_v<vec<T, N>> = N;
template <class Vector, class T, int Stored, int... Lane>
inline constexpr int lane_count_v<Swizzle<Vector, T, Stored, Lane...>> = sizeof...(Lane);

template <class T, int N>
struct vec : VectorStorage<T, N> {
  using VectorStorage<T, N>::lanes;

  vec() = default;
  // Written out: on CUDA to copy the whole word, in the emulator because the reference makes the
  // compiler check its alignment, and everywhere because a swizzle's assignment copies no storage.
#ifdef HUSKY_CUDA
  HUSKY_FUNC vec(const vec& other) { this->word = other.word; }
  HUSKY_FUNC vec& operator=(const vec& other) {
    this->word = other.word;
    return *this;
  }
#else
  HUSKY_FUNC vec(const vec& other) { __builtin_memcpy(this, &other, sizeof(vec)); }
  HUSKY_FUNC vec& operator=(const vec& other) {
    __builtin_memcpy(this, &other, sizeof(vec));
    return *this;
  }
#endif
  HUSKY_FUNC vec(T value) {
    for (int i = 0; i < N; i++) lanes[i] = value;
  }
  // By value: the source is loaded whole before its lanes are converted.
  template <class U, class = enable_if_t<!is_same_v<U, T>>>
  HUSKY_FUNC explicit vec(vec<U, N> other) {
    for (int i = 0; i < N; i++) lanes[i] = static_cast<T>(other.lanes[i]);
  }
  template <class A, class B, class... Rest,
            class = enable_if_t<(lane_count_v<A> + lane_count_v<B> + (0 + ... +
                                 lane_count_v<Rest>)) == N>>
  HUSKY_FUNC vec(A first, B second, Rest... rest) {
    int filled = 0;
    append(filled, first);
    append(filled, second);
    (append(filled, rest), ...);
  }

  HUSKY_FUNC T& operator[](int i) { return lanes[i]; }
  HUSKY_FUNC const T& operator[](int i) const { return lanes[i]; }

 private:
  template <class A> HUSKY_FUNC void append(int& filled, A value) {
    lanes[filled++] = static_cast<T>(value);
  }
  template <class U, int M> HUSKY_FUNC void append(int& filled, vec<U, M> part) {
    for (int i = 0; i < M; i++) lanes[filled++] = static_cast<T>(part.lanes[i]);
  }
  template <class Vector, class U, int Stored, int... Lane>
  HUSKY_FUNC void append(int& filled, Swizzle<Vector, U, Stored, Lane...> part) {
    append(filled, Vector(part));
  }

 public:
  // Operands by value, for whole loads; friends, so that scalars and swizzles convert to vectors.
#define HUSKY_LANEWISE(op)                                                    \
  friend HUSKY_FUNC vec operator op(vec a, vec b) {                           \
    for (int i = 0; i < N; i++) a[i] = static_cast<T>(a[i] op b[i]);          \
    return a;                                                                 \
  }                                                                           \
  friend HUSKY_FUNC vec& operator op##=(vec& a, vec b) { return a = a op b; }
  HUSKY_LANEWISE(+)
  HUSKY_LANEWISE(-)
  HUSKY_LANEWISE(*)
  HUSKY_LANEWISE(/)
  HUSKY_LANEWISE(%)
  HUSKY_LANEWISE(&)
  HUSKY_LANEWISE(|)
  HUSKY_LANEWISE(^)
  HUSKY_LANEWISE(<<)
  HUSKY_LANEWISE(>>)
#undef HUSKY_LANEWISE

#define HUSKY_LANEWISE_COMPARISON(op)                                         \
  friend HUSKY_FUNC vec<bool, N> operator op(vec a, vec b) {                  \
    vec<bool, N> result;                                                      \
    for (int i = 0; i < N; i++) result[i] = a[i] op b[i];                     \
    return result;                                                            \
  }
  HUSKY_LANEWISE_COMPARISON(<)
  HUSKY_LANEWISE_COMPARISON(>)
  HUSKY_LANEWISE_COMPARISON(<=)
  HUSKY_LANEWISE_COMPARISON(>=)
  HUSKY_LANEWISE_COMPARISON(==)
  HUSKY_LANEWISE_COMPARISON(!=)
#undef HUSKY_LANEWISE_COMPARISON

  friend HUSKY_FUNC vec operator-(vec v) {
    for (int i = 0; i < N; i++) v[i] = static_cast<T>(-v[i]);
    return v;
  }
  friend HUSKY_FUNC vec operator~(vec v) {
    for (int i = 0; i < N; i++) v[i] = static_cast<T>(~v[i]);
    return v;
  }
  friend HUSKY_FUNC T dot(vec a, vec b) {
    T sum = a[0] * b[0];
    for (int i = 1; i < N; i++) sum = static_cast<T>(sum + a[i] * b[i]);
    return sum;
  }
  friend HUSKY_FUNC bool any(vec v) {
    bool result = false;
    for (int i = 0; i < N; i++) result = result || v[i];
    return result;
  }
  friend HUSKY_FUNC bool all(vec v) {
    bool result = true;
    for (int i = 0; i < N; i++) result = result && v[i];
    return result;
  }
};

#define HUSKY_VECTOR_NAMES(name, T) \
  using name##2 = vec<T, 2>;        \
  using name##3 = vec<T, 3>;        \
  using name##4 = vec<T, 4>;
HUSKY_VECTOR_NAMES(float, float)
HUSKY_VECTOR_NAMES(half, half)
HUSKY_VECTOR_NAMES(bfloat, bfloat)
HUSKY_VECTOR_NAMES(int, int)
HUSKY_VECTOR_NAMES(uint, uint)
HUSKY_VECTOR_NAMES(short, short)
HUSKY_VECTOR_NAMES(ushort, ushort)
HUSKY_VECTOR_NAMES(char, signed char)
HUSKY_VECTOR_NAMES(uchar, uchar)
HUSKY_VECTOR_NAMES(long, long)
HUSKY_VECTOR_NAMES(ulong, ulong)
HUSKY_VECTOR_NAMES(bool, bool)
#undef HUSKY_VECTOR_NAMES
#undef HUSKY_COPY_WORD
#undef HUSKY_PAIR
#undef HUSKY_PAIRS2
#undef HUSKY_PAIRS3
#undef HUSKY_PAIRS4

}  // namespace metal
