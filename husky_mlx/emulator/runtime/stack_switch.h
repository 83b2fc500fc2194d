// Saves the callee-saved registers on the running stack, its pointer in *save, and resumes the
// stack whose pointer is given. glibc's swapcontext does the same through a system call.
#pragma once
#include <stdint.h>

extern "C" void switch_stack(void** save, void* resume) __asm__("husky_switch_stack");

#if defined(__x86_64__)
__asm__(R"(
.text
.p2align 4
husky_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
__asm__(R"(
.text
.p2align 4
husky_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

// A stack that starts in entry() when first resumed. `top` is 16-byte aligned.
inline void* prepare_stack(char* top, void (*entry)()) {
#if defined(__x86_64__)
  void** stack = reinterpret_cast<void**>(top) - 1;  // a function starts 8 bytes off alignment
  *--stack = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; i++) *--stack = nullptr;
  return stack;
#else
  uint64_t* stack = reinterpret_cast<uint64_t*>(top) - 20;
  for (int i = 0; i < 20; i++) stack[i] = 0;
  stack[11] = reinterpret_cast<uint64_t>(entry);  // x30, the return address
  return stack;
#endif
}
