// metal_kernels/copies.h without CUDA's instructions: a copy is made when its set is waited for, and
// not before.

struct Copy {
  threadgroup uint* out;
  const device uint* from;
  int words;
  bool live;
  int set;
};

struct Copies {
  int sets = 0;
  int count = 0;
  Copy waiting[256];
};

template <int BYTES>
inline void copy_ahead(
    thread Copies& copies, threadgroup uint* out, const device void* from, bool live) {
  copies.waiting[copies.count++] = {
      out, reinterpret_cast<const device uint*>(from), BYTES / 4, live, copies.sets};
}

inline void end_copies(thread Copies& copies) {
  copies.sets++;
}

template <int LEFT>
inline void wait_for_copies(thread Copies& copies) {
  int left = 0;
  for (int i = 0; i < copies.count; i++) {
    const Copy copy = copies.waiting[i];
    if (copy.set >= copies.sets - LEFT) {
      copies.waiting[left++] = copy;
      continue;
    }
    for (int word = 0; word < copy.words; word++) {
      copy.out[word] = copy.live ? copy.from[word] : 0u;
    }
  }
  copies.count = left;
}
