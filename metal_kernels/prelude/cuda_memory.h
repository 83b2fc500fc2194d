// Barriers, atomics, in-place inputs and thread attributes on CUDA.
#pragma once

// What a chain of kernels in one launch (prelude/chain.h) defines anew: whether the results of the
// launch before are there, waited for where they are not yet; and loads of them, which must then
// stay behind that wait. A launch of its own finds its inputs there.
#define MSL_INPUTS_READY() true
#define MSL_SHARED_ASM asm

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
HUSKY_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
HUSKY_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
HUSKY_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

// Where threadgroup memory is for an instruction that takes nothing else.
HUSKY_FUNC uint threadgroup_address(const void* pointer) {
  return static_cast<uint>(__cvta_generic_to_shared(pointer));
}

// Casts const away from an input: the buffer is updated in place, as the KV append does.
template <class T> HUSKY_FUNC T* mutable_input(const T* pointer) {
  return const_cast<T*>(pointer);
}

enum memory_order { memory_order_relaxed, memory_order_acq_rel };

// Orders the memory accesses of this thread, and those of its threadgroup that a barrier put before
// or puts after it, for the whole device, as far as a counter needs it: less than __threadfence().
HUSKY_FUNC void atomic_thread_fence(mem_flags, memory_order) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

template <class T> HUSKY_FUNC T* atomic_address(volatile atomic<T>* object) {
  return const_cast<T*>(&object->value);
}
template <class T>
HUSKY_FUNC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  return object->value;
}
template <class T>
HUSKY_FUNC void atomic_store_explicit(volatile atomic<T>* object, type_identity_t<T> value,
                                      memory_order) {
  object->value = value;
}
#define HUSKY_ATOMIC(name, function, operand)                                              \
  template <class T>                                                                       \
  HUSKY_FUNC T atomic_##name##_explicit(volatile atomic<T>* object, type_identity_t<T> value, \
                                        memory_order) {                                    \
    return function(atomic_address(object), operand);                                      \
  }
HUSKY_ATOMIC(exchange, ::atomicExch, value)
HUSKY_ATOMIC(fetch_add, ::atomicAdd, value)
HUSKY_ATOMIC(fetch_sub, ::atomicAdd, static_cast<T>(-value))
HUSKY_ATOMIC(fetch_min, ::atomicMin, value)
HUSKY_ATOMIC(fetch_max, ::atomicMax, value)
HUSKY_ATOMIC(fetch_and, ::atomicAnd, value)
HUSKY_ATOMIC(fetch_or, ::atomicOr, value)
HUSKY_ATOMIC(fetch_xor, ::atomicXor, value)
#undef HUSKY_ATOMIC

// The thread attributes, as functions of their names.
namespace attributes {

HUSKY_FUNC uint3 threadgroup_position_in_grid() {
  return uint3(blockIdx.x, blockIdx.y, blockIdx.z);
}
HUSKY_FUNC uint3 thread_position_in_threadgroup() {
  return uint3(threadIdx.x, threadIdx.y, threadIdx.z);
}
HUSKY_FUNC uint3 threads_per_threadgroup() { return uint3(blockDim.x, blockDim.y, blockDim.z); }
HUSKY_FUNC uint3 threadgroups_per_grid() { return uint3(gridDim.x, gridDim.y, gridDim.z); }
HUSKY_FUNC uint3 threads_per_grid() { return threadgroups_per_grid() * threads_per_threadgroup(); }
HUSKY_FUNC uint3 thread_position_in_grid() {
  return threadgroup_position_in_grid() * threads_per_threadgroup() +
         thread_position_in_threadgroup();
}
HUSKY_FUNC uint thread_index_in_threadgroup() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
HUSKY_FUNC uint simdgroup_index_in_threadgroup() { return thread_index_in_threadgroup() / 32; }
HUSKY_FUNC uint thread_index_in_simdgroup() { return thread_index_in_threadgroup() % 32; }
HUSKY_FUNC uint simdgroups_per_threadgroup() {
  return blockDim.x * blockDim.y * blockDim.z / 32;
}

}  // namespace attributes
}  // namespace metal
