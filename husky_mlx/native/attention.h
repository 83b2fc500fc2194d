// Attention over the live rows of a KV cache in float32, by online softmax: a running maximum and
// sum a query, so that keys are read block by block and scores are never all in memory.
#pragma once

#include "tiles.h"

namespace husky {

// GROUP_HEADS query heads read one key/value head, whose rows hold D elements of type KV.
template <int D_, int GROUP_HEADS_, typename KV>
struct Attention {
  static constexpr int D = D_, GROUP_HEADS = GROUP_HEADS_;
  static constexpr int VECTORS = round_up(D, LANES) / LANES, PADDED = VECTORS * LANES;
  static constexpr int KEYS = TILE_COLUMNS;  // scored at once
  static constexpr int SPAN = 2 * KEYS;      // in decoding
  // Query tokens that share one transposed block of keys.
  static constexpr int TOKENS = 4 * TILE_ROWS;
  // A partial result: maximum and sum in the first vector, then the weighted values.
  static constexpr int PARTIAL = LANES + PADDED;

  static constexpr int64_t scratch_floats() {
    const int64_t many = (int64_t)D * KEYS + (int64_t)KEYS * PADDED + TILE_ROWS * KEYS +
                         (int64_t)GROUP_HEADS * TOKENS * (PADDED + 2);
    const int64_t one = (int64_t)GROUP_HEADS * (SPAN + LANES * LANES) + (int64_t)SPAN * PADDED;
    return round_up((int)(many > one ? many : one), LANES);
  }

  // One token's heads (GROUP_HEADS, D) over rows [first, last): GROUP_HEADS partial results.
  static void decode(const float* queries, const KV* keys, const KV* values, int first, int last,
                     float* partials, int64_t partial_stride, float* scratch) {
    float* scores = scratch;
    float* sums = scores + GROUP_HEADS * SPAN;
    float* copied = sums + GROUP_HEADS * LANES * LANES;
    for (int head = 0; head < GROUP_HEADS; ++head) {
      float* partial = partials + head * partial_stride;
      for (int i = 0; i < PARTIAL; i += LANES) store_floats(partial + i, Floats{});
      partial[0] = -__builtin_inff();
    }
    for (int base = first; base < last; base += SPAN) {
      const int count = last - base < SPAN ? last - base : SPAN;
      for (int key = 0; key < count; key += LANES)
        score(queries, keys + (int64_t)(base + key) * D, count - key, sums, scores + key);
      for (int head = 0; head < GROUP_HEADS; ++head) {
        float* partial = partials + head * partial_stride;
        soften(scores + head * SPAN, 0, count, round_up(count, LANES), partial, partial + 1,
               partial + LANES);
      }
      add_values(scores, SPAN, values + (int64_t)base * D, count, partials + LANES, partial_stride,
                 GROUP_HEADS, copied);
    }
  }

  // Heads of several tokens. The first token sees the rows below `last`, each next one a row more,
  // and none more than `window` rows. The rows of `queries` and `out` are GROUP_HEADS heads of D.
  static void prefill(const float* queries, int64_t query_stride, int tokens, const KV* keys,
                      const KV* values, int last, int window, float* out, int64_t out_stride,
                      float* scratch) {
    float* turned = scratch;                          // keys (D, KEYS)
    float* copied = turned + (int64_t)D * KEYS;       // values (KEYS, PADDED)
    float* scores = copied + (int64_t)KEYS * PADDED;  // (TILE_ROWS, KEYS)
    float* gathered = scores + TILE_ROWS * KEYS;      // (GROUP_HEADS, TOKENS, PADDED)
    float* maxima = gathered + (int64_t)GROUP_HEADS * TOKENS * PADDED;
    float* totals = maxima + GROUP_HEADS * TOKENS;
    for (int i = 0; i < GROUP_HEADS * TOKENS; ++i) {
      maxima[i] = -__builtin_inff();
      totals[i] = 0;
      for (int j = 0; j < PADDED; j += LANES) store_floats(gathered + i * PADDED + j, Floats{});
    }
    const auto first_row = [&](int token) {
      return last + token > window ? last + token - window : 0;
    };
    const int end = last + tokens - 1;
    for (int base = first_row(0); base < end; base += KEYS) {
      const int count = end - base < KEYS ? end - base : KEYS;
      turn(keys + (int64_t)base * D, count, turned);
      for (int tile = 0; tile < tokens; tile += TILE_ROWS) {
        const int rows = tokens - tile < TILE_ROWS ? tokens - tile : TILE_ROWS;
        if (base >= last + tile + rows - 1 || base + count <= first_row(tile)) continue;
        for (int head = 0; head < GROUP_HEADS; ++head) {
          for (int i = 0; i < rows * KEYS; i += LANES) store_floats(scores + i, Floats{});
          add_product(queries + tile * query_stride + head * D, query_stride, turned, KEYS, D,
                      scores, KEYS, rows, TILE_VECTORS);
          const int at = head * TOKENS + tile;
          for (int i = 0; i < rows; ++i) {
            const int token = tile + i;
            const int from = first_row(token) - base, to = last + token - base;
            soften(scores + i * KEYS, from > 0 ? from : 0, to < count ? to : count, KEYS,
                   maxima + at + i, totals + at + i, gathered + (int64_t)(at + i) * PADDED);
          }
          add_values(scores, KEYS, values + (int64_t)base * D, count,
                     gathered + (int64_t)at * PADDED, PADDED, rows, copied);
        }
      }
    }
    for (int head = 0; head < GROUP_HEADS; ++head)
      for (int token = 0; token < tokens; ++token) {
        const int at = head * TOKENS + token;
        write(gathered + (int64_t)at * PADDED, 1 / totals[at], out + token * out_stride + head * D);
      }
  }

  // The weighted mean of one head's partial results.
  static void merge(const float* partials, int64_t stride, int count, float* out) {
    float most = -__builtin_inff();
    for (int i = 0; i < count; ++i)
      most = partials[i * stride] > most ? partials[i * stride] : most;
    Floats total[VECTORS] = {};
    float sum = 0;
    for (int i = 0; i < count; ++i) {
      const float* partial = partials + i * stride;
      const float weight = exponential(splat(partial[0] - most))[0];
      sum += partial[1] * weight;
      for (int j = 0; j < VECTORS; ++j)
        total[j] += load_floats(partial + LANES + j * LANES) * weight;
    }
    write(reinterpret_cast<const float*>(total), 1 / sum, out);
  }

 private:
  static void write(const float* from, float factor, float* out) {
    in_vectors(D, [&](int i, int count) {
      store_floats(out + i, load_floats(from + i, count) * factor, count);
    });
  }

  // scores[head * SPAN + i] for LANES keys, of which `count` exist.
  static void score(const float* queries, const KV* keys, int count, float* sums, float* scores) {
    for (int key = 0; key < LANES; ++key) {
      Floats row[VECTORS] = {};
      if (key < count)
        for (int j = 0; j < VECTORS; ++j) row[j] = part(keys + key * D, j);
      for (int head = 0; head < GROUP_HEADS; ++head) {
        Floats total{};
        for (int j = 0; j < VECTORS; ++j) total += row[j] * part(queries + head * D, j);
        store_floats(sums + (head * LANES + key) * LANES, total);
      }
    }
    for (int head = 0; head < GROUP_HEADS; ++head) {
      Floats rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = load_floats(sums + (head * LANES + i) * LANES);
      store_floats(scores + head * SPAN, sums_of_rows(rows));
    }
  }

  template <typename T>
  static Floats part(const T* row, int vector) {
    const int left = D - vector * LANES;
    return left >= LANES ? load_floats(row + vector * LANES)
                         : load_floats(row + vector * LANES, left);
  }

  // Scores [from, to) become weights, the others of `width` 0; what was gathered so far is
  // rescaled.
  static void soften(float* scores, int from, int to, int width, float* maximum, float* total,
                     float* gathered) {
    if (from >= to) {
      for (int i = 0; i < width; i += LANES) store_floats(scores + i, Floats{});
      return;
    }
    const float none = -__builtin_inff();
    if (from > 0 || to < width)
      for (int i = 0; i < width; i += LANES) {
        const Ints lane = lanes() + i;
        const auto seen = (lane >= from) & (lane < to);
        store_floats(scores + i, seen ? load_floats(scores + i) : splat(none));
      }
    Floats most = splat(*maximum);
    for (int i = 0; i < width; i += LANES) most = larger(most, load_floats(scores + i));
    const Floats highest = reduce(most, larger<Floats>);
    const Floats kept = exponential(*maximum - highest);
    Floats added{};
    for (int i = 0; i < width; i += LANES) {
      const Floats weight = exponential(load_floats(scores + i) - highest);
      store_floats(scores + i, weight);
      added += weight;
    }
    *maximum = highest[0];
    *total = *total * kept[0] + sum(added);
    for (int j = 0; j < PADDED; j += LANES)
      store_floats(gathered + j, load_floats(gathered + j) * kept);
  }

  static Ints lanes() {
    Ints result;
    for (int i = 0; i < LANES; ++i) result[i] = i;
    return result;
  }

  static void add_values(const float* weights, int64_t stride, const KV* values, int count,
                         float* gathered, int64_t gathered_stride, int rows, float* copied) {
    if constexpr (D % LANES == 0) {
      add_product(weights, stride, values, D, count, gathered, gathered_stride, rows, VECTORS);
    } else {
      for (int i = 0; i < count; ++i)
        for (int j = 0; j < VECTORS; ++j)
          store_floats(copied + i * PADDED + j * LANES, part(values + (int64_t)i * D, j));
      add_product(weights, stride, copied, PADDED, count, gathered, gathered_stride, rows, VECTORS);
    }
  }

  static void turn(const KV* keys, int count, float* turned) {
    for (int key = 0; key < KEYS; key += LANES)
      in_vectors(D, [&](int column, int columns) {
        Words block[LANES] = {};
        for (int i = 0; i < LANES && key + i < count; ++i)
          block[i] = bits_as<Words>(load_floats(keys + (int64_t)(key + i) * D + column, columns));
        transpose(block);
        for (int i = 0; i < columns; ++i) store(turned + (column + i) * KEYS + key, block[i]);
      });
  }
};

}  // namespace husky
