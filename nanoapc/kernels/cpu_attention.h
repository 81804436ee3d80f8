// Attention over the tiles of a plan, straight from the paged KV cache.
//
// A task is (tile, KV head): all rows of the tile with all query heads that share the KV head are the columns
//
//     column = row * group + head in group          16 columns = one column tile
//
// and a span of up to 256 KV positions is folded into their running state at a time:
//
//     scores   [tile][256 positions][16 columns]  = K * Q^T        K read where it lies
//     new m    = max(m, scores);  weights = exp(scores - new m), exactly 0 where masked
//     l, acc   = (l, acc) * exp(m - new m) + weights * (1, V)
//
// Invariant: a row's result is the same bits whatever tile, chunk of columns or thread it is in. Masked positions add
// exact zeros, so cutting a span at the row's own position changes nothing; positions that no row of the task may see
// are not multiplied at all, so that NaN in unused slots cannot leak.

#pragma once

#include "cpu_matrix.h"

namespace nanoapc {

constexpr int64_t SPAN = 256;          // AttentionPlan's SPAN
constexpr int64_t MAX_COLUMNS = 256;   // columns of a task at most
enum Column { ROW_START, NUM_ROWS, TABLE, KV_START, KV_END, LEVEL, TILE_SIZE };

// ---- weights * V, and the accumulator's layout, by engine ----

// acc [tile][d][16 columns]
template <typename Element> struct VectorValues {
  using T = Element;
  using Engine = VectorEngine<T>;

  static int64_t acc_size(int64_t d) { return d * LANES; }

  static void rescale(float* acc, int64_t d, f32x16 factor) {
    for (int64_t i = 0; i < d; ++i) store(acc + i * LANES, load(acc + i * LANES) * factor);
  }
  static void accumulate(const T* const* v, int64_t n, int64_t d, const float* weights, int64_t num_tiles, float* acc) {
    float* values = scratch<float>(VALUES, SPAN * d);
    for (int64_t i = 0; i < n; ++i) convert(v[i], d, values + i * d);
    multiply_rows(values, 1, d, n, weights, SPAN * LANES, acc, acc_size(d), d, num_tiles, true);
  }
  static void read_column(const float* acc, int c, int64_t d, float* out) {
    for (int64_t i = 0; i < d; ++i) out[i] = acc[i * LANES + c];
  }
  static void write_column(float* acc, int c, int64_t d, const float* in) {
    for (int64_t i = 0; i < d; ++i) acc[i * LANES + c] = in[i];
  }
};

#ifdef NANOAPC_AMX

// acc [tile][d / 16][16 columns][16]
struct AmxValues {
  using Engine = AmxEngine;
  using T = c10::BFloat16;

  static int64_t acc_size(int64_t d) { return d * LANES; }

  static void rescale(float* acc, int64_t d, f32x16 factor) {
    for (int64_t i = 0; i < d; i += LANES)
      for (int c = 0; c < LANES; ++c, acc += LANES) store(acc, load(acc) * factor[c]);
  }

  // v[n] rows of d -> tiles [32 positions][d / 16]: [16 pairs of positions][16 d][2], zeros from position n on
  static void pack_values(const T* const* v, int64_t n, int64_t d, T* out) {
    alignas(64) static constexpr uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    const int64_t tile = 32 * LANES;
    for (int64_t i = 0; i < (n + 31) / 32 * 32; i += 2) {
      T* pair = out + i / 32 * d / LANES * tile + i % 32 / 2 * 32;
      for (int64_t j = 0; j < d; j += 32, pair += 2 * tile) {
        const __mmask32 mask = d - j >= 32 ? ~0u : 0xffffu;
        const __m512i low = i < n ? _mm512_maskz_loadu_epi16(mask, v[i] + j) : _mm512_setzero_si512();
        const __m512i high = i + 1 < n ? _mm512_maskz_loadu_epi16(mask, v[i + 1] + j) : _mm512_setzero_si512();
        _mm512_store_si512(pair, _mm512_permutex2var_epi16(low, first, high));
        if (d - j >= 32) _mm512_store_si512(pair + tile, _mm512_permutex2var_epi16(low, second, high));
      }
    }
  }

  static void accumulate(const T* const* v, int64_t n, int64_t d, float* weights, int64_t num_tiles, float* acc) {
    const int64_t steps = (n + 31) / 32, tile = 32 * LANES, d_tiles = d / LANES;
    T* values = scratch<T>(VALUES, SPAN * d);
    pack_values(v, n, d, values);
    T* packed = scratch<T>(WEIGHTS, num_tiles * SPAN * LANES);  // [tile][32 positions]: [16 columns][32]
    for (int64_t t = 0; t < num_tiles; ++t) {
      float* w = weights + t * SPAN * LANES;
      std::fill(w + n * LANES, w + steps * tile, 0.0f);
      for (int64_t s = 0; s < steps; ++s) transpose_to_bf16(w + s * tile, packed + (t * (SPAN / 32) + s) * tile, 32);
    }
    for (int64_t t = 0; t < num_tiles; t += 2) {
      const T* a[2] = {packed + t * SPAN * LANES, packed + (t + 1) * SPAN * LANES};
      const bool two = t + 1 < num_tiles;
      for (int64_t j = 0; j < d_tiles; j += 2) {
        const bool pair = j + 1 < d_tiles;
        auto* block = two ? (pair ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                          : (pair ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
        block(a, 32, tile, values + j * tile, tile, d_tiles * tile, steps, acc + (t * d_tiles + j) * BLOCK,
              d_tiles * BLOCK, BLOCK, true);
      }
    }
  }
  static void read_column(const float* acc, int c, int64_t d, float* out) {
    for (int64_t i = 0; i < d; i += LANES) store(out + i, load(acc + i * LANES + c * LANES));
  }
  static void write_column(float* acc, int c, int64_t d, const float* in) {
    for (int64_t i = 0; i < d; i += LANES) store(acc + i * LANES + c * LANES, load(in + i));
  }
};

#endif

// ---- one task ----

template <typename Values> struct Attention {
  using Engine = typename Values::Engine;
  using T = typename Engine::Element;

  const T* q;  // [T, H, D]
  T* out;      // [T, H, D]
  const T* cache;
  int64_t block_stride, value_offset, num_heads, num_kv_heads, block_size, head_dim;
  const int64_t* positions;
  const int32_t* tables;
  int64_t table_width;
  float scale;
  float* state;             // [T, H, D + 2] acc, m, l between the tiles of a row; nullptr: each row has one tile
  const int32_t* last_level;  // [T] level of each row's last tile; nullptr with state

  // Where positions [start, start + n) of a sequence have their keys, and groups of 16 keys as the engine wants them.
  void find_rows(const int32_t* table, int64_t head, int64_t start, int64_t n, const T** k, const T** groups) const {
    const T* base = cache + head * block_size * head_dim;
    int64_t block = start / block_size, offset = start % block_size;
    for (int64_t i = 0; i < n;) {
      const T* row = base + table[block] * block_stride + offset * head_dim;
      const int64_t end = std::min(n, i + block_size - offset);
      for (; i < end; ++i, row += head_dim) k[i] = row;
      ++block, offset = 0;
    }
    const int64_t width = padded_dim();
    if (in_place()) {
      for (int64_t i = 0; i < n; i += LANES) groups[i / LANES] = k[i];
      return;
    }
    T* gathered = scratch<T>(COLUMNS, SPAN * width);
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy((void*)(gathered + i * width), k[i], head_dim * sizeof(T));
      std::fill(gathered + i * width + head_dim, gathered + (i + 1) * width, T(0.0f));
    }
    for (int64_t i = 0; i < n; i += LANES) groups[i / LANES] = gathered + i * width;
  }
  int64_t padded_dim() const { return (head_dim + Engine::K_MULTIPLE - 1) / Engine::K_MULTIPLE * Engine::K_MULTIPLE; }
  bool in_place() const { return block_size % LANES == 0 && padded_dim() == head_dim; }

  // Scores of n positions from `start` on for 16 columns -> weights in place; returns exp(m - new m).
  // Meanwhile it has the memory bring `ahead` (the values, or nullptr), which will be read next.
  f32x16 softmax(float* scores, int64_t start, int64_t n, const int32_t* position, f32x16& m, f32x16& l,
                 const T* const* ahead) const {
    const i32x16 last_seen = load_raw<i32x16>(position);
    f32x16 largest = m;
    bool masked = false;
    for (int c = 0; c < LANES; ++c) masked |= last_seen[c] < start + n - 1;
    for (int64_t i = 0; i < n; ++i) {
      f32x16 s = load(scores + i * LANES) * scale;
      if (masked) s = last_seen >= (i32x16{} + int32_t(start + i)) ? s : broadcast(-INFINITY);
      store(scores + i * LANES, s);
      largest = max(s, largest);
    }
    f32x16 sum{};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; ahead && j < head_dim; j += 64 / sizeof(T)) __builtin_prefetch(ahead[i] + value_offset + j);
      const f32x16 weight = exp(load(scores + i * LANES) - largest);
      store(scores + i * LANES, weight);
      sum += weight;
    }
    const f32x16 factor = exp(m - largest);
    l = l * factor + sum;
    m = largest;
    return factor;
  }

  // Columns [first, first + num) of a tile and a KV head.
  void run(const int32_t* tile, int64_t head, int64_t first, int64_t num) const {
    const int64_t group = num_heads / num_kv_heads, num_tiles = (num + LANES - 1) / LANES, d = head_dim;
    const int64_t packed = Engine::packed_size(d), acc_size = Values::acc_size(d);
    auto* queries = scratch<typename Engine::Packed>(QUERIES, num_tiles * packed);
    float* scores = scratch<float>(SCORES, num_tiles * SPAN * LANES);
    float* acc = scratch<float>(ACCUMULATOR, num_tiles * acc_size + d);
    alignas(64) int32_t position[MAX_COLUMNS];
    f32x16 m[MAX_COLUMNS / LANES], l[MAX_COLUMNS / LANES];
    auto row_of = [&](int64_t c) { return tile[ROW_START] + (first + c) / group; };
    auto index_of = [&](int64_t c) { return row_of(c) * num_heads + head * group + (first + c) % group; };

    int64_t end = 0;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const T* rows[LANES] = {};
      for (int64_t c = t * LANES; c < (t + 1) * LANES; ++c) {
        position[c] = c < num ? static_cast<int32_t>(positions[row_of(c)]) : INT32_MAX;
        if (c >= num) continue;
        rows[c % LANES] = q + index_of(c) * d;
        end = std::max<int64_t>(end, position[c] + 1);
      }
      Engine::pack(rows, d, queries + t * packed);
      m[t] = broadcast(-INFINITY), l[t] = f32x16{};
    }
    end = std::min<int64_t>(end, tile[KV_END]);
    std::fill(acc, acc + num_tiles * acc_size, 0.0f);
    if (tile[KV_START] > 0)
      for (int64_t c = 0; c < num; ++c) {
        const float* saved = state + index_of(c) * (d + 2);
        Values::write_column(acc + c / LANES * acc_size, c % LANES, d, saved);
        m[c / LANES][c % LANES] = saved[d], l[c / LANES][c % LANES] = saved[d + 1];
      }

    const T *k[SPAN], *groups[SPAN / LANES];
    for (int64_t start = tile[KV_START]; start < end; start += SPAN) {
      const int64_t n = std::min(SPAN, end - start);
      find_rows(tables + tile[TABLE] * table_width, head, start, n, k, groups);
      Engine::multiply(groups, (n + LANES - 1) / LANES, padded_dim(), d, queries, num_tiles, scores, SPAN * LANES);
      for (int64_t t = 0; t < num_tiles; ++t) {
        const f32x16 factor =
            softmax(scores + t * SPAN * LANES, start, n, position + t * LANES, m[t], l[t], t == 0 ? k : nullptr);
        if (start > 0) Values::rescale(acc + t * acc_size, d, factor);
      }
      for (int64_t i = 0; i < n; ++i) k[i] += value_offset;  // from here on: the values
      Values::accumulate(k, n, d, scores, num_tiles, acc);
    }

    float* result = acc + num_tiles * acc_size;
    for (int64_t c = 0; c < num; ++c) {
      const bool last = !state || last_level[row_of(c)] == tile[LEVEL];
      float* saved = last ? result : state + index_of(c) * (d + 2);
      Values::read_column(acc + c / LANES * acc_size, c % LANES, d, saved);
      if (last) {
        const float sum = l[c / LANES][c % LANES];
        for (int64_t i = 0; i < d; i += LANES)
          store_some(out + index_of(c) * d + i, load_some(result + i, d - i) / sum, d - i);
      } else {
        saved[d] = m[c / LANES][c % LANES], saved[d + 1] = l[c / LANES][c % LANES];
      }
    }
  }
};

}  // namespace nanoapc
