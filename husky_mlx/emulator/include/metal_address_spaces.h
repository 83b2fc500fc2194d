// Declarations only: the vocabulary for the compiler's check of address spaces, in which device,
// constant and threadgroup are real ones. Vectors are the compiler's own (a class of ours could not
// be read from another address space), built by make_vector.
#pragma once

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
using half = _Float16;
using bfloat = __bf16;
using float16_t = half;
using bfloat16_t = bfloat;
constexpr half operator""h(long double value) { return static_cast<half>(value); }
constexpr half operator""h(unsigned long long value) { return static_cast<half>(value); }

#define METAL_FUNC inline
#define INFINITY (__builtin_huge_valf())
#define NAN (__builtin_nanf(""))
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define HUSKY_DEVICE __attribute__((address_space(1)))
#define HUSKY_THREADGROUP __attribute__((address_space(3)))

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N, class... Parts> vec<T, N> make_vector(Parts...);
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

template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <bool Condition, class Yes, class No> struct conditional { using type = Yes; };
template <class Yes, class No> struct conditional<false, Yes, No> { using type = No; };
template <bool Condition, class Yes, class No>
using conditional_t = typename conditional<Condition, Yes, No>::type;
template <bool Condition, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool Condition, class T = void>
using enable_if_t = typename enable_if<Condition, T>::type;
template <class T> struct type_identity { using type = T; };
template <class T> using type_identity_t = typename type_identity<T>::type;

template <class T> struct numeric_limits {
  static constexpr T min();
  static constexpr T lowest();
  static constexpr T max();
  static constexpr T epsilon();
  static constexpr T infinity();
};

// The functions take any one type: which overloads exist is the running program's business.
#define HUSKY_ONE(name) template <class T> T name(T);
#define HUSKY_TWO(name) template <class T> T name(T, T);
#define HUSKY_TRANSCENDENTALS                                                             \
  HUSKY_ONE(exp) HUSKY_ONE(exp2) HUSKY_ONE(log) HUSKY_ONE(log2) HUSKY_ONE(log10)          \
  HUSKY_ONE(sin) HUSKY_ONE(cos) HUSKY_ONE(tan) HUSKY_ONE(atan) HUSKY_ONE(sinh)            \
  HUSKY_ONE(cosh) HUSKY_ONE(tanh) HUSKY_ONE(sqrt) HUSKY_ONE(rsqrt) HUSKY_TWO(pow)         \
  HUSKY_TWO(atan2) HUSKY_TWO(divide)
HUSKY_TRANSCENDENTALS
namespace fast { HUSKY_TRANSCENDENTALS }
namespace precise { HUSKY_TRANSCENDENTALS }
HUSKY_ONE(fabs) HUSKY_ONE(abs) HUSKY_ONE(floor) HUSKY_ONE(ceil) HUSKY_ONE(round) HUSKY_ONE(rint)
HUSKY_ONE(trunc) HUSKY_ONE(fract) HUSKY_ONE(saturate) HUSKY_ONE(sign)
HUSKY_TWO(fmin) HUSKY_TWO(fmax) HUSKY_TWO(min) HUSKY_TWO(max) HUSKY_TWO(fmod) HUSKY_TWO(copysign)
template <class T> T clamp(T, type_identity_t<T>, type_identity_t<T>);
template <class T, int N> vec<T, N> clamp(vec<T, N>, T, T);
template <class T> T fma(T, T, T);
template <class T> T mix(T, T, T);
template <class T, class Condition> T select(T, T, Condition);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
template <class T> bool any(T);
template <class T> bool all(T);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
uint popcount(uint);
uint clz(uint);
uint ctz(uint);
template <class To, class From> To as_type(From);

#define HUSKY_REDUCTION(name)             \
  template <class T> T simd_##name(T);    \
  template <class T> T quad_##name(T);
HUSKY_REDUCTION(sum) HUSKY_REDUCTION(product) HUSKY_REDUCTION(max) HUSKY_REDUCTION(min)
HUSKY_REDUCTION(and) HUSKY_REDUCTION(or) HUSKY_REDUCTION(xor)
HUSKY_ONE(simd_prefix_inclusive_sum) HUSKY_ONE(simd_prefix_exclusive_sum)
HUSKY_ONE(simd_broadcast_first)
template <class T> T simd_broadcast(T, ushort);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_shuffle_up(T, ushort);
template <class T> T quad_broadcast(T, ushort);
template <class T> T quad_shuffle_xor(T, ushort);
bool simd_all(bool);
bool simd_any(bool);

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
constexpr mem_flags operator|(mem_flags a, mem_flags) { return a; }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> HUSKY_DEVICE T* mutable_input(const HUSKY_DEVICE T*);

enum memory_order { memory_order_relaxed, memory_order_acq_rel };
void atomic_thread_fence(mem_flags, memory_order);
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
#define HUSKY_FETCH(space, name) \
  template <class T>             \
  T atomic_##name##_explicit(volatile space atomic<T>*, type_identity_t<T>, memory_order);
#define HUSKY_ATOMICS(space)                                                                       \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);        \
  template <class T>                                                                               \
  void atomic_store_explicit(volatile space atomic<T>*, type_identity_t<T>, memory_order);         \
  HUSKY_FETCH(space, exchange) HUSKY_FETCH(space, fetch_add) HUSKY_FETCH(space, fetch_sub)         \
  HUSKY_FETCH(space, fetch_min) HUSKY_FETCH(space, fetch_max) HUSKY_FETCH(space, fetch_and)        \
  HUSKY_FETCH(space, fetch_or) HUSKY_FETCH(space, fetch_xor)
HUSKY_ATOMICS(HUSKY_DEVICE)
HUSKY_ATOMICS(HUSKY_THREADGROUP)

template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
};
using simdgroup_float8x8 = simdgroup_matrix<float>;
using simdgroup_half8x8 = simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat>;
template <class T, int Columns, int Rows>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T);
#define HUSKY_MATRIX_MEMORY(space)                                                                 \
  template <class T, class S>                                                                      \
  void simdgroup_load(simdgroup_matrix<T>&, const space S*, ulong = 8, ulong2 = 0, bool = false);  \
  template <class T, class S>                                                                      \
  void simdgroup_store(simdgroup_matrix<T>, space S*, ulong = 8, ulong2 = 0, bool = false);
HUSKY_MATRIX_MEMORY(HUSKY_DEVICE)
HUSKY_MATRIX_MEMORY(HUSKY_THREADGROUP)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D>&, simdgroup_matrix<A>, simdgroup_matrix<B>,
                                   simdgroup_matrix<C>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D>&, simdgroup_matrix<A>, simdgroup_matrix<B>);

}  // namespace metal
using namespace metal;
