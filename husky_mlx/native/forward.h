// One call of a model: tokens in, keys and values appended, logits out. Every size is a constant of
// Shape, which the emitted source defines.
#pragma once

#include "arena.h"
#include "call.h"
#include "pointwise.h"
#include "pool.h"

namespace husky {

template <typename Shape>
class Forward {
  using Memory = Arena<Shape>;
  using Attend = typename Memory::Attend;
  using KV = typename Shape::KV;
  static constexpr int HIDDEN = Shape::HIDDEN, D = Shape::HEAD_DIM;
  static constexpr int QUERY_SIZE = Memory::QUERY_SIZE, GROUP_HEADS = Attend::GROUP_HEADS;
  static constexpr int OUT_STRIDE = Memory::OUT_STRIDE, MOST_SPANS = Memory::MOST_SPANS;
  static constexpr int UNIT = Memory::UNIT;

  template <typename M>
  static constexpr bool INTEGER = M::PACKED && !Shape::EXACT;
  template <typename M>
  static constexpr int layout_of() {
    if constexpr (INTEGER<M>) return M::BITS == 4 ? SPLIT : NATURAL;
    return FLOATS;
  }
  template <typename M>
  static constexpr int LAYOUT = layout_of<M>();

 public:
  Forward(Pool& pool, char* arena, const Call& call, int thread)
      : pool_(pool),
        call_(call),
        weights_(call.addresses),
        carver_{arena},
        shared_(carver_),
        own_(Memory::own(carver_, thread)) {}

  void run() {
    pool_.each(call_.count, [&](int token) { embed(token); });
    for (int layer = 0; layer < Shape::LAYERS; ++layer)
      Shape::with_layer(layer, [&](auto format) { run_layer<decltype(format)>(layer); });
    if (call_.wanted == 0) return;
    const int first = call_.count - call_.wanted;
    call_.hidden != nullptr ? final_norms(first) : head(first);
  }

 private:
  void embed(int token) {
    using M = typename Shape::Embedding;
    const Tensor table = weights_.embedding();
    float* x = shared_.x + (int64_t)token * HIDDEN;
    in_vectors(HIDDEN, [&](int i, int count) {
      store_floats(x + i, M::values(table, call_.tokens[token], i, count), count);
    });
    rotary_row(Shape::FREQUENCIES, D / 2, call_.position + token, cosines(token), sines(token));
  }

  float* cosines(int token) const { return shared_.cosines + token * (D / 2); }
  float* sines(int token) const { return shared_.sines + token * (D / 2); }

  template <typename Format>
  void run_layer(int layer) {
    using F = Format;
    // The last layer's other tokens are needed for their keys and values only.
    const int first = layer + 1 == Shape::LAYERS ? call_.count - call_.wanted : 0;
    const int tokens = call_.count - first;

    const auto input_norm = static_cast<const typename F::InputNorm*>(weights_.input_norm(layer));
    constexpr int QKV =
        LAYOUT<typename F::Query> | LAYOUT<typename F::Key> | LAYOUT<typename F::Value>;
    const auto normed = norm<QKV>(input_norm, 0, call_.count);
    constexpr int ALL_HEADS = Shape::HEADS + 2 * Shape::KV_HEADS;
    pool_.each(ALL_HEADS, [&](int unit) {
      // Queries last: they are the fewer tokens in the last layer.
      if (unit < Shape::KV_HEADS)
        key_head<typename F::Key, typename F::KeyNorm>(layer, unit, normed);
      else if (unit < 2 * Shape::KV_HEADS)
        value_head<typename F::Value>(layer, unit - Shape::KV_HEADS, normed);
      else if (tokens > 0)
        query_head<typename F::Query, typename F::QueryNorm>(layer, unit - 2 * Shape::KV_HEADS,
                                                             normed, first, tokens);
    });
    if (tokens == 0) return;

    const auto attended = attend<LAYOUT<typename F::Output>>(layer, first, tokens);
    add_to_stream<typename F::Output>(weights_.projection(layer, Weights::OUTPUT), attended,
                                      tokens == 1 ? 0 : first, first, tokens);

    const auto post_norm = static_cast<const typename F::PostNorm*>(weights_.post_norm(layer));
    constexpr int GATE_UP = LAYOUT<typename F::Gate> | LAYOUT<typename F::Up>;
    gate_up<F>(layer, norm<GATE_UP>(post_norm, first, tokens), tokens == 1 ? 0 : first, first,
               tokens);
    add_to_stream<typename F::Down>(weights_.projection(layer, Weights::DOWN), shared_.gated, first,
                                    first, tokens);
  }

  // The normed residual stream of tokens [first, first + tokens); a single one stands at 0.
  template <int LAYOUTS, typename T>
  Activations<HIDDEN> norm(const T* weight, int first, int tokens) {
    if (tokens == 1) {
      norm_row<LAYOUTS>(weight, first, own_.normed, 0);
      return own_.normed;
    }
    pool_.each(tokens, [&](int token) {
      norm_row<LAYOUTS>(weight, first + token, shared_.normed, first + token);
    });
    return shared_.normed;
  }

  template <int LAYOUTS, typename T>
  void norm_row(const T* weight, int token, const Activations<HIDDEN>& to, int at) {
    rms_norm(shared_.x + (int64_t)token * HIDDEN, weight, HIDDEN, Shape::EPS, to.row(at));
    to.template quantise<LAYOUTS>(at);
  }

  // Rows of a matrix times tokens into the thread's own memory.
  template <typename M>
  float* product(const Tensor& tensor, int row, int rows, const Activations<M::COLUMNS>& x,
                 int token, int tokens, float* out, int stride) {
    multiply<M, INTEGER<M>>(tensor, row, rows, x, token, tokens, own_.unpacked, out, stride);
    for (int t = 0; t < tokens; ++t) add_bias<M>(tensor, row, rows, out + (int64_t)t * stride);
    return out;
  }

  template <typename M>
  float* head_product(const Tensor& tensor, int head, const Activations<HIDDEN>& x, int first,
                      int tokens) {
    const int token = call_.count == 1 ? 0 : first;
    return product<M>(tensor, head * D, D, x, token, tokens, own_.out, OUT_STRIDE);
  }

  template <typename M, typename Norm>
  void query_head(int layer, int head, const Activations<HIDDEN>& x, int first, int tokens) {
    const Tensor tensor = weights_.projection(layer, Weights::QUERY);
    float* out = head_product<M>(tensor, head, x, first, tokens);
    for (int t = 0; t < tokens; ++t, out += OUT_STRIDE) {
      const int token = first + t;
      rms_norm_in_place<Norm>(out, weights_.query_norm(layer), D, Shape::EPS);
      rotate<D, Shape::TRADITIONAL>(out, cosines(token), sines(token),
                                    Shape::SCALE * Shape::MAGNITUDE);
      std::memcpy(shared_.queries + (int64_t)token * QUERY_SIZE + head * D, out, D * sizeof(float));
    }
  }

  template <typename M, typename Norm>
  void key_head(int layer, int head, const Activations<HIDDEN>& x) {
    const Tensor tensor = weights_.projection(layer, Weights::KEY);
    float* out = head_product<M>(tensor, head, x, 0, call_.count);
    for (int token = 0; token < call_.count; ++token) {
      float* row = out + (int64_t)token * OUT_STRIDE;
      rms_norm_in_place<Norm>(row, weights_.key_norm(layer), D, Shape::EPS);
      rotate<D, Shape::TRADITIONAL>(row, cosines(token), sines(token), Shape::MAGNITUDE);
    }
    append(call_.caches[layer].keys, layer, head, out);
  }

  template <typename M>
  void value_head(int layer, int head, const Activations<HIDDEN>& x) {
    const Tensor tensor = weights_.projection(layer, Weights::VALUE);
    append(call_.caches[layer].values, layer, head,
           head_product<M>(tensor, head, x, 0, call_.count));
  }

  static KV* head_rows(void* buffer, const CacheRows& cache, int head) {
    return static_cast<KV*>(buffer) + head * cache.capacity * D;
  }

  void append(void* buffer, int layer, int head, const float* out) {
    const CacheRows& cache = call_.caches[layer];
    KV* to = head_rows(buffer, cache, head) + cache.slot * D;
    for (int token = 0; token < call_.count; ++token, out += OUT_STRIDE, to += D)
      in_vectors(
          D, [&](int i, int count) { store_floats(to + i, load_floats(out + i, count), count); });
  }

  template <int LAYOUTS>
  Activations<QUERY_SIZE> attend(int layer, int first, int tokens) {
    const CacheRows& cache = call_.caches[layer];
    if (tokens == 1) return attend_one<LAYOUTS>(cache, first);
    // Rows that the first of these tokens sees.
    const int last = (int)cache.live - tokens + 1;
    const int window = cache.window < cache.live ? (int)cache.window : (int)cache.live;
    const int blocks = (tokens + Attend::TOKENS - 1) / Attend::TOKENS;
    pool_.each(blocks * Shape::KV_HEADS, [&](int unit) {
      // The costly ones, which see most, first.
      const int start = (blocks - 1 - unit / Shape::KV_HEADS) * Attend::TOKENS;
      const int head = unit % Shape::KV_HEADS;
      const int count = tokens - start < Attend::TOKENS ? tokens - start : Attend::TOKENS;
      const int64_t column = (int64_t)head * GROUP_HEADS * D;
      Attend::prefill(shared_.queries + (int64_t)(first + start) * QUERY_SIZE + column, QUERY_SIZE,
                      count, head_rows(cache.keys, cache, head),
                      head_rows(cache.values, cache, head), last + start, window,
                      shared_.attended.row(first + start) + column, Activations<QUERY_SIZE>::STRIDE,
                      own_.attention);
    });
    if constexpr (LAYOUTS != FLOATS)
      pool_.each(tokens,
                 [&](int token) { shared_.attended.template quantise<LAYOUTS>(first + token); });
    return shared_.attended;
  }

  // The rows are shared out too, so that few heads keep many threads busy.
  template <int LAYOUTS>
  Activations<QUERY_SIZE> attend_one(const CacheRows& cache, int token) {
    const int last = (int)cache.live;
    const int start = cache.live > cache.window ? (int)(cache.live - cache.window) : 0;
    const int even = (last - start + MOST_SPANS - 1) / MOST_SPANS;
    const int span = round_up(even, Attend::SPAN), spans = (last - start + span - 1) / span;
    const int64_t stride = MOST_SPANS * Attend::PARTIAL;
    pool_.each(spans * Shape::KV_HEADS, [&](int unit) {
      const int head = unit / spans, from = start + unit % spans * span;
      Attend::decode(
          shared_.queries + (int64_t)token * QUERY_SIZE + head * GROUP_HEADS * D,
          head_rows(cache.keys, cache, head), head_rows(cache.values, cache, head), from,
          from + span < last ? from + span : last,
          shared_.partials + head * GROUP_HEADS * stride + unit % spans * Attend::PARTIAL, stride,
          own_.attention);
    });
    for (int head = 0; head < Shape::HEADS; ++head)
      Attend::merge(shared_.partials + head * stride, Attend::PARTIAL, spans,
                    own_.attended.row(0) + head * D);
    own_.attended.template quantise<LAYOUTS>(0);
    return own_.attended;
  }

  // x[to + i] += matrix times the activations at token + i.
  template <typename M>
  void add_to_stream(const Tensor& tensor, const Activations<M::COLUMNS>& x, int token, int to,
                     int tokens) {
    pool_.each((HIDDEN + UNIT - 1) / UNIT, [&](int unit) {
      const int row = unit * UNIT, rows = HIDDEN - row < UNIT ? HIDDEN - row : UNIT;
      const float* out = product<M>(tensor, row, rows, x, token, tokens, own_.out, UNIT);
      for (int t = 0; t < tokens; ++t, out += UNIT) {
        float* stream = shared_.x + (int64_t)(to + t) * HIDDEN + row;
        in_vectors(rows, [&](int i, int count) {
          store_floats(stream + i, load_floats(stream + i, count) + load_floats(out + i, count),
                       count);
        });
      }
    });
  }

  template <typename F>
  void gate_up(int layer, const Activations<HIDDEN>& x, int token, int to, int tokens) {
    using Gate = typename F::Gate;
    using Up = typename F::Up;
    constexpr int WIDTH = Shape::INTERMEDIATE, LAYOUTS = LAYOUT<typename F::Down>;
    static_assert(UNIT == GROUP, "a unit quantises what it made");
    const Tensor gate_weights = weights_.projection(layer, Weights::GATE);
    const Tensor up_weights = weights_.projection(layer, Weights::UP);
    pool_.each((WIDTH + UNIT - 1) / UNIT, [&](int unit) {
      const int row = unit * UNIT, rows = WIDTH - row < UNIT ? WIDTH - row : UNIT;
      float* up_out = own_.out + (int64_t)tokens * UNIT;
      const float* gate = product<Gate>(gate_weights, row, rows, x, token, tokens, own_.out, UNIT);
      const float* up = product<Up>(up_weights, row, rows, x, token, tokens, up_out, UNIT);
      for (int t = 0; t < tokens; ++t, gate += UNIT, up += UNIT) {
        float* result = shared_.gated.row(to + t) + row;
        in_vectors(rows, [&](int i, int count) {
          store_floats(result + i, gated(load_floats(gate + i, count), load_floats(up + i, count)),
                       count);
        });
        if constexpr (LAYOUTS != FLOATS) shared_.gated.template quantise<LAYOUTS>(to + t, unit);
      }
    });
  }

  void final_norms(int first) {
    const auto weight = static_cast<const typename Shape::FinalNorm*>(weights_.final_norm());
    pool_.each(call_.wanted, [&](int token) {
      rms_norm(shared_.x + (int64_t)(first + token) * HIDDEN, weight, HIDDEN, Shape::EPS,
               call_.hidden + (int64_t)token * HIDDEN);
    });
  }

  void head(int first) {
    using M = typename Shape::Head;
    const int tokens = call_.wanted, from = tokens == 1 ? 0 : first;
    const auto weight = static_cast<const typename Shape::FinalNorm*>(weights_.final_norm());
    const auto& normed = tokens == 1 ? own_.normed : shared_.normed;
    const auto prepare = [&](int token) {
      const float* x = shared_.x + (int64_t)(first + token) * HIDDEN;
      rms_norm(x, weight, HIDDEN, Shape::EPS, normed.row(from + token));
      normed.template quantise<LAYOUT<M>>(from + token);
    };
    if (tokens == 1)
      prepare(0);
    else
      pool_.each(tokens, prepare);
    pool_.each((M::ROWS + UNIT - 1) / UNIT, [&](int unit) {
      const int row = unit * UNIT, rows = M::ROWS - row < UNIT ? M::ROWS - row : UNIT;
      const float* out =
          product<M>(weights_.head(), row, rows, normed, from, tokens, own_.out, UNIT);
      for (int t = 0; t < tokens; ++t)
        std::memcpy(call_.logits + (int64_t)t * M::ROWS + row, out + t * UNIT,
                    rows * sizeof(float));
    });
  }

  Pool& pool_;
  const Call& call_;
  const Weights weights_;
  Carver carver_;
  const typename Memory::Shared shared_;
  const typename Memory::Private own_;
};

}  // namespace husky
