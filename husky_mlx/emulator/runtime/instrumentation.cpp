// What clang's instrumentation calls. -fsanitize=thread calls a __tsan_ function at each load and
// store of a kernel: only that call is used, not the sanitizer's runtime. -fsanitize=array-bounds
// and its like call the __ubsan_ handlers, whose arguments are laid out as for compiler-rt's own.
#include <string.h>

#include "state.h"

namespace {

struct Place {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct Type {
  uint16_t kind;
  uint16_t info;
  char name[1];
};
struct BoundsCheck {
  Place place;
  const Type* array;
  const Type* index;
};
struct AlignmentCheck {
  Place place;
  const Type* type;
  unsigned char log2_alignment;
  unsigned char access;
};

const char* file_name(const Place& place) {
  const char* slash = strrchr(place.file, '/');
  return slash ? slash + 1 : place.file;
}

}  // namespace

using namespace emulator;

extern "C" {

void __tsan_init() {}

#define HUSKY_HOOKS(size)                                                          \
  void __tsan_read##size(void* p) {                                                \
    check_access(p, size, EMULATOR_READ, false, __builtin_return_address(0));             \
  }                                                                                \
  void __tsan_write##size(void* p) {                                               \
    check_access(p, size, EMULATOR_WRITE, false, __builtin_return_address(0));            \
  }                                                                                \
  void __tsan_unaligned_read##size(void* p) {                                      \
    check_access(p, size, EMULATOR_READ, false, __builtin_return_address(0));             \
  }                                                                                \
  void __tsan_unaligned_write##size(void* p) {                                     \
    check_access(p, size, EMULATOR_WRITE, false, __builtin_return_address(0));            \
  }
HUSKY_HOOKS(1)
HUSKY_HOOKS(2)
HUSKY_HOOKS(4)
HUSKY_HOOKS(8)
HUSKY_HOOKS(16)
#undef HUSKY_HOOKS

void* __tsan_memcpy(void* target, const void* source, size_t size) {
  check_access(source, size, EMULATOR_READ, false, __builtin_return_address(0));
  check_access(target, size, EMULATOR_WRITE, false, __builtin_return_address(0));
  return memcpy(target, source, size);
}
void* __tsan_memmove(void* target, const void* source, size_t size) {
  check_access(source, size, EMULATOR_READ, false, __builtin_return_address(0));
  check_access(target, size, EMULATOR_WRITE, false, __builtin_return_address(0));
  return memmove(target, source, size);
}
void* __tsan_memset(void* target, int value, size_t size) {
  check_access(target, size, EMULATOR_WRITE, false, __builtin_return_address(0));
  return memset(target, value, size);
}

void __ubsan_handle_out_of_bounds(BoundsCheck* check, uintptr_t index) {
  record_failure("out of bounds", "index %lld of an array of type %s (at %s line %u)",
                 static_cast<long long>(static_cast<int64_t>(index)), check->array->name,
                 file_name(check->place), check->place.line);
  abandon();
}

void __ubsan_handle_type_mismatch_v1(AlignmentCheck* check, uintptr_t address) {
  record_failure("misaligned access", "an address used as %s is off its %u-byte alignment by %u "
                 "(at %s line %u)",
                 check->type->name, 1u << check->log2_alignment,
                 static_cast<unsigned>(address & ((1u << check->log2_alignment) - 1)),
                 file_name(check->place), check->place.line);
  abandon();
}

void __ubsan_handle_divrem_overflow(Place* place, uintptr_t, uintptr_t) {
  record_failure("undefined arithmetic", "integer division by zero or overflow (at %s line %u)",
                 file_name(*place), place->line);
  abandon();
}

void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t count) {
  record_failure("undefined arithmetic", "shift by %lld, outside the width of its type "
                 "(at %s line %u)",
                 static_cast<long long>(static_cast<int64_t>(count)), file_name(*place),
                 place->line);
  abandon();
}
}
