// Barriers, threadgroup arrays, atomics and the one way to write to an input.
#pragma once

#define HUSKY_PLACE EmulatorPlace place = EmulatorPlace{__builtin_FILE(), __builtin_LINE()}

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
HUSKY_FUNC void threadgroup_barrier(mem_flags memory, HUSKY_PLACE) {
  emulator_threadgroup_barrier(static_cast<uint>(memory), place);
}
HUSKY_FUNC void simdgroup_barrier(mem_flags memory, HUSKY_PLACE) {
  emulator_simdgroup_barrier(static_cast<uint>(memory), place);
}

// Casts const away from an input: the buffer is updated in place, as the KV append does.
template <class T>
HUSKY_FUNC T* mutable_input(const T* pointer) {
  emulator_make_mutable(pointer);
  return const_cast<T*>(pointer);
}

enum memory_order { memory_order_relaxed, memory_order_acq_rel };

HUSKY_FUNC void atomic_thread_fence(mem_flags, memory_order) { emulator_device_fence(); }

template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

template <class T>
HUSKY_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  emulator_atomic(object, EMULATOR_READ);
  return as_type<T>(emulator_load_word(object));
}
template <class T>
HUSKY_FUNC T atomic_exchange_explicit(volatile atomic<T>* object, type_identity_t<T> value,
                                      memory_order) {
  emulator_atomic(object, EMULATOR_UPDATE);
  const T before = as_type<T>(emulator_load_word(object));
  emulator_store_word(object, as_type<uint>(value));
  return before;
}
template <class T>
HUSKY_FUNC void atomic_store_explicit(volatile atomic<T>* object, type_identity_t<T> value,
                                      memory_order) {
  emulator_atomic(object, EMULATOR_WRITE);
  emulator_store_word(object, as_type<uint>(value));
}

#define HUSKY_FETCH(name, expression)                                                      \
  template <class T>                                                                       \
  HUSKY_FUNC T atomic_fetch_##name##_explicit(volatile atomic<T>* object,                  \
                                              type_identity_t<T> value, memory_order) {    \
    emulator_atomic(object, EMULATOR_UPDATE);                                              \
    const T before = as_type<T>(emulator_load_word(object));                               \
    emulator_store_word(object, as_type<uint>(static_cast<T>(expression)));                \
    return before;                                                                         \
  }
HUSKY_FETCH(add, before + value)
HUSKY_FETCH(sub, before - value)
HUSKY_FETCH(min, min(before, value))
HUSKY_FETCH(max, max(before, value))
HUSKY_FETCH(and, before & value)
HUSKY_FETCH(or, before | value)
HUSKY_FETCH(xor, before ^ value)
#undef HUSKY_FETCH

}  // namespace metal

namespace emulator {

template <class A> struct Element { using type = A; };
template <class A, unsigned long N> struct Element<A[N]> {
  using type = typename Element<A>::type;
};

// What `threadgroup T name[N];` of a body becomes.
template <class Array, unsigned index>
HUSKY_FUNC Array& threadgroup_array(const char* name) {
  return *static_cast<Array*>(emulator_threadgroup_array(
      index, name, sizeof(Array), sizeof(typename Element<Array>::type)));
}

}  // namespace emulator
