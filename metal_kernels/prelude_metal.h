// The helpers that every platform has under one name, for Metal. Prepended to a kernel's header.

// Casts const away from an input: the buffer is updated in place, as the KV append does. MLX does
// not see the write, so whoever reads the buffer next must be ordered after this kernel by hand.
template <typename T>
inline device T* mutable_input(const device T* pointer) {
  return (device T*)pointer;
}
