// What a call of a model is given. program.py and buffers.py know this layout.
#pragma once

#include "matrix.h"

namespace husky {

// One layer's KV buffers, (kv_heads, capacity, head_dim) each, and where this call is in them.
struct CacheRows {
  void* keys;
  void* values;
  int64_t capacity;
  int64_t slot;    // row of the first token of the call, the next ones follow
  int64_t live;    // rows from 0 on that the last token sees, if its window is wide enough
  int64_t window;  // most rows that a token sees
};

struct Call {
  const void* const* addresses;  // see Weights
  const CacheRows* caches;       // one a layer
  const int32_t* tokens;
  float* logits;  // (wanted, vocabulary)
  float* hidden;  // in their place, unless null: (wanted, hidden) after the final norm
  int64_t position;
  int32_t count;   // tokens, at most Shape::BLOCK
  int32_t wanted;  // results for the last `wanted` tokens: 0, 1 or count
};

// The order of Call::addresses.
class Weights {
 public:
  enum Projection { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PROJECTIONS };
  static constexpr int PARTS = 4, NORMS = 4, GLOBAL = 1 + 2 * PARTS,
                       LAYER = NORMS + PROJECTIONS * PARTS;

  explicit Weights(const void* const* addresses) : addresses_(addresses) {}
  const void* final_norm() const { return addresses_[0]; }
  Tensor embedding() const { return tensor(1); }
  Tensor head() const { return tensor(1 + PARTS); }
  const void* input_norm(int layer) const { return norm(layer, 0); }
  const void* post_norm(int layer) const { return norm(layer, 1); }
  const void* query_norm(int layer) const { return norm(layer, 2); }
  const void* key_norm(int layer) const { return norm(layer, 3); }
  Tensor projection(int layer, Projection which) const {
    return tensor(GLOBAL + layer * LAYER + NORMS + which * PARTS);
  }

 private:
  const void* norm(int layer, int which) const {
    return addresses_[GLOBAL + layer * LAYER + which];
  }
  Tensor tensor(int at) const {
    return {addresses_[at], addresses_[at + 1], addresses_[at + 2], addresses_[at + 3]};
  }
  const void* const* addresses_;
};

}  // namespace husky
