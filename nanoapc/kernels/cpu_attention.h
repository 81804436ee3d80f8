// Attention over the tiles of a plan, straight from the paged KV cache.
//
// A task is (tile, KV head): all rows of the tile with all query heads that share the KV head are the columns
//
//     column = row * group + head in group          16 columns = one column tile
//
// and a span of up to 256 KV positions is folded into their running state at a time, two column tiles after two, so
// that their scores stay in the first-level cache:
//
//     scores   [column][256 positions]            = (K * Q^T)^T        K read where it lies
//     new m    = max(m, scores);  weights = 2^(scores - new m), exactly 0 where the column does not see
//     l, acc   = (l, acc) * 2^(m - new m) + weights * (1, V)
//
// (scores are scaled by log2(e), so that powers of 2 do.)
//
// Decode waits for memory: while a span is computed, its V and the K of what comes next are on their way (`Ahead`).
//
// Invariant: a row's result is the same bits whatever tile, chunk of columns or thread it is in. Positions that it does
// not see add exact zeros, so cutting a span at the row's own position changes nothing; positions that no row of the
// task may see are not multiplied at all, so that NaN in unused slots cannot leak.

#pragma once

#include "cpu_matrix.h"

namespace nanoapc {

constexpr int64_t SPAN = 256;          // AttentionPlan's SPAN
constexpr int64_t MAX_COLUMNS = 256;   // columns of a task at most
constexpr int64_t TILES_AT_ONCE = 2;   // column tiles
constexpr int64_t CHUNK = 32;          // positions that are scored together
enum Column { ROW_START, NUM_ROWS, TABLE, KV_START, KV_END, LEVEL, TILE_SIZE };

struct Task { int32_t tile, head, first, num; };  // columns [first, first + num) of a tile and a KV head

// Rows of the cache that will be read soon: each call has the memory bring some more of them.
template <typename T> struct Ahead {
  const T* const* rows;
  int64_t num_rows, offset, width;
  int64_t next = 0;

  void fetch(int64_t count) {
    for (const int64_t end = std::min(num_rows, next + count); next < end; ++next)
      for (int64_t j = 0; j < width; j += 64 / sizeof(T)) __builtin_prefetch(rows[next] + offset + j, 0, 2);
  }
};

// ---- weights * V, by engine ----
//
// acc      [d / 16][16 columns][16], one for each column tile; `accumulate` adds to it or (`add` false) begins it
// pack     V of n positions, each at its key + offset, as the engine wants them
// weights  `place`: where the weights of CHUNK positions from i on of a column lie

inline int64_t acc_size(int64_t d) { return (d + LANES - 1) / LANES * BLOCK; }

template <typename Element> struct VectorValues {
  using T = Element;
  using Packed = float;
  using Engine = VectorEngine<T>;

  static float* place(float* weights, int64_t column, int64_t i) { return weights + column * SPAN + i; }
  static void put(float* place, f32x16 first, f32x16 second) { store(place, first), store(place + LANES, second); }

  // [d / 16][SPAN][16]
  static const float* pack(const T* const* k, int64_t offset, int64_t n, int64_t d, Ahead<T>& ahead) {
    float* values = scratch<float>(VALUES, SPAN * (d + LANES));
    for (int64_t i = 0; i < n; ++i, ahead.fetch(1))
      for (int64_t j = 0; j < d; j += LANES) store(values + j * SPAN + i * LANES, load_some(k[i] + offset + j, d - j));
    return values;
  }

  static void accumulate(const float* values, int64_t n, int64_t d, const float* weights, int64_t num_columns,
                         float* acc, bool add, Ahead<T>&) {
    for (int64_t c = 0; c < num_columns; c += LANES, acc += acc_size(d))
      multiply_rows(weights + c * SPAN, SPAN, 1, n, values, SPAN * LANES, acc, BLOCK,
                    std::min<int64_t>(LANES, num_columns - c), (d + LANES - 1) / LANES, add);
  }
};

#ifdef NANOAPC_AMX

struct AmxValues {
  using T = c10::BFloat16;
  using Packed = T;
  using Engine = AmxEngine;

  // [column tile][SPAN / 32][16 columns][32 positions]
  static T* place(T* weights, int64_t column, int64_t i) {
    return weights + (column / LANES * SPAN + i) * LANES + column % LANES * CHUNK;
  }
  static void put(T* place, f32x16 first, f32x16 second) {
    _mm512_store_si512(place, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  }

  // Tiles [32 positions][d / 16]: [16 pairs of positions][16 d][2], zeros from position n on
  static const T* pack(const T* const* k, int64_t offset, int64_t n, int64_t d, Ahead<T>& ahead) {
    alignas(64) static constexpr uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    T* out = scratch<T>(VALUES, SPAN * d);
    const int64_t tile = 32 * LANES;
    for (int64_t i = 0; i < (n + 31) / 32 * 32; i += 2, ahead.fetch(1)) {
      T* pair = out + i / 32 * d / LANES * tile + i % 32 / 2 * 32;
      for (int64_t j = 0; j < d; j += 32, pair += 2 * tile) {
        const __mmask32 mask = d - j >= 32 ? ~0u : 0xffffu;
        const __m512i zero = _mm512_setzero_si512();
        const __m512i low = i < n ? _mm512_maskz_loadu_epi16(mask, k[i] + offset + j) : zero;
        const __m512i high = i + 1 < n ? _mm512_maskz_loadu_epi16(mask, k[i + 1] + offset + j) : zero;
        _mm512_store_si512(pair, _mm512_permutex2var_epi16(low, first, high));
        if (d - j >= 32) _mm512_store_si512(pair + tile, _mm512_permutex2var_epi16(low, second, high));
      }
    }
    return out;
  }

  static void accumulate(const T* values, int64_t n, int64_t d, const T* weights, int64_t num_columns, float* acc,
                         bool add, Ahead<T>& ahead) {
    const int64_t steps = (n + 31) / 32, tile = 32 * LANES, d_tiles = d / LANES;
    const T* a[2] = {weights, weights + SPAN * LANES};
    const bool two = num_columns > LANES;
    for (int64_t j = 0; j < d_tiles; j += 2, ahead.fetch(SPAN / d_tiles)) {
      const bool pair = j + 1 < d_tiles;
      auto* block = two ? (pair ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                        : (pair ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
      block(a, 32, tile, values + j * tile, tile, d_tiles * tile, steps, acc + j * BLOCK, acc_size(d), BLOCK, add);
    }
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
  const int32_t* tiles;
  const int64_t* positions;
  const int32_t* tables;
  int64_t table_width;
  float scale;
  float* state;             // [T, H, D + 2] acc, m, l between the tiles of a row; nullptr: each row has one tile
  const int32_t* last_level;  // [T] level of each row's last tile; nullptr with state

  // Where a span of a sequence has its keys.
  struct Span {
    int64_t n;
    const T* rows[SPAN];
  };
  void find(const int32_t* tile, int64_t head, int64_t start, int64_t end, Span& span) const {
    span.n = std::clamp<int64_t>(end - start, 0, SPAN);
    const T* base = cache + head * block_size * head_dim;
    const int32_t* block = tables + tile[TABLE] * table_width + start / block_size;
    for (int64_t i = 0, offset = start % block_size; i < span.n; ++block, offset = 0) {
      const T* row = base + *block * block_stride + offset * head_dim;
      for (const int64_t stop = std::min(span.n, i + block_size - offset); i < stop; ++i, row += head_dim)
        span.rows[i] = row;
    }
  }

  // The keys of a span in groups of 16 rows as the engine wants them.
  void group_keys(const Span& span, const T** groups) const {
    const int64_t width = padded_dim();
    T* gathered = in_place() ? nullptr : scratch<T>(COLUMNS, SPAN * width);
    for (int64_t i = 0; gathered && i < span.n; ++i) {
      std::memcpy((void*)(gathered + i * width), span.rows[i], head_dim * sizeof(T));
      std::fill(gathered + i * width + head_dim, gathered + (i + 1) * width, T(0.0f));
    }
    for (int64_t i = 0; i < span.n; i += LANES) groups[i / LANES] = gathered ? gathered + i * width : span.rows[i];
  }
  int64_t padded_dim() const { return (head_dim + Engine::K_MULTIPLE - 1) / Engine::K_MULTIPLE * Engine::K_MULTIPLE; }
  bool in_place() const { return block_size % LANES == 0 && padded_dim() == head_dim; }

  // What the columns of a task carry from span to span besides acc, and where they belong (place: row * H + head).
  struct Columns {
    alignas(64) float m[MAX_COLUMNS], l[MAX_COLUMNS];
    int64_t row[MAX_COLUMNS], place[MAX_COLUMNS], position[MAX_COLUMNS];
  };

  // Folds the scores of a span into `num` columns of a tile, from column `first` of the task on: scores -> weights.
  // factor[16]: what each column's acc is to be multiplied by.
  void softmax(float* scores, int64_t start, int64_t n, Columns& columns, int64_t first, int64_t num,
               typename Values::Packed* weights, float* factor, Ahead<T>& ahead) const {
    alignas(64) float m[LANES], l[LANES];
    int64_t visible[LANES];
    store(m, load(columns.m + first)), store(l, f32x16{});
    for (int64_t c = 0; c < num; ++c) {
      visible[c] = std::clamp<int64_t>(columns.position[first + c] + 1 - start, 0, n);
      if (visible[c] == 0) continue;
      float* s = scores + c * SPAN;
      std::fill(s + visible[c], s + (visible[c] + CHUNK - 1) / CHUNK * CHUNK, -INFINITY);
      f32x16 even = load(s), odd = load(s + LANES);
      for (int64_t i = CHUNK; i < visible[c]; i += CHUNK)
        even = max(load(s + i), even), odd = max(load(s + i + LANES), odd);
      m[c] = std::max(m[c], max_lanes(max(even, odd)) * scale);
    }
    store(factor, exp2(load(columns.m + first) - load(m)));
    for (int64_t c = 0; c < num; ++c, ahead.fetch(CHUNK)) {
      const float* s = scores + c * SPAN;
      f32x16 even{}, odd{};
      int64_t i = 0;
      for (; i < visible[c]; i += CHUNK) {
        f32x16 low = exp2(load(s + i) * scale - m[c]), high = exp2(load(s + i + LANES) * scale - m[c]);
        if (i + CHUNK > visible[c]) {
          const i32x16 left = i32x16{} + int32_t(visible[c] - i);
          low = lane_numbers() < left ? low : f32x16{};
          high = lane_numbers() + LANES < left ? high : f32x16{};
        }
        Values::put(Values::place(weights, c, i), low, high);
        even += low, odd += high;
      }
      l[c] = sum_lanes(even + odd);
      for (; i < n; i += CHUNK) Values::put(Values::place(weights, c, i), f32x16{}, f32x16{});
    }
    store(columns.l + first, load(columns.l + first) * load(factor) + load(l));
    store(columns.m + first, load(m));
  }

  // Scores of a span for up to two column tiles: [column][SPAN]
  void score(const T* const* groups, int64_t n, const typename Engine::Packed* queries, int64_t num_columns,
             float* scores, Ahead<T>& ahead) const {
    alignas(64) float c[2][TILES_AT_ONCE * 2 * BLOCK];
    const int64_t num_groups = (n + LANES - 1) / LANES, num_tiles = (num_columns + LANES - 1) / LANES;
    auto multiply = [&](int64_t g) {
      if (g < num_groups)
        Engine::multiply(groups + g, std::min<int64_t>(2, num_groups - g), padded_dim(), head_dim, queries, num_tiles,
                         c[g / 2 % 2], 2 * BLOCK);
    };
    multiply(0);
    for (int64_t g = 0; g < num_groups; g += 2, ahead.fetch(LANES)) {
      multiply(g + 2);  // meanwhile the matrix unit is busy with what comes next
      for (int64_t t = 0; t < num_tiles; ++t)
        for (int64_t h = 0; h < std::min<int64_t>(2, num_groups - g); ++h)
          transpose(c[g / 2 % 2] + (2 * t + h) * BLOCK, scores + t * LANES * SPAN + (g + h) * LANES, SPAN,
                    std::min<int64_t>(LANES, num_columns - t * LANES));
    }
  }

  // Runs a task; `next` (or nullptr) is what this thread will run after it.
  void run(const Task& task, const Task* next) const {
    const int64_t d = head_dim, packed = Engine::packed_size(d);
    const int64_t num_tiles = (task.num + LANES - 1) / LANES;
    const int32_t* tile = tiles + task.tile * TILE_SIZE;
    auto* queries = scratch<typename Engine::Packed>(QUERIES, num_tiles * packed);
    float* scores = scratch<float>(SCORES, TILES_AT_ONCE * LANES * SPAN);
    auto* weights = scratch<typename Values::Packed>(WEIGHTS, TILES_AT_ONCE * LANES * SPAN);
    float* acc = scratch<float>(ACCUMULATOR, num_tiles * acc_size(d));
    Columns columns;
    const int64_t end = start_columns(task, columns, queries, acc);

    const T* groups[SPAN / LANES];
    Span spans[2];
    find(tile, task.head, tile[KV_START], end, spans[0]);
    for (int64_t start = tile[KV_START], turn = 0; start < end; start += SPAN, turn ^= 1) {
      Span &here = spans[turn], &then = spans[turn ^ 1];
      const int64_t n = here.n;
      then.n = 0;
      if (start + SPAN < end)
        find(tile, task.head, start + SPAN, end, then);
      else if (next)
        find_first(*next, then);
      Ahead<T> ahead_values{here.rows, n, value_offset, d}, ahead_keys{then.rows, then.n, 0, d};
      group_keys(here, groups);
      const typename Values::Packed* values = nullptr;
      for (int64_t t = 0; t < num_tiles; t += TILES_AT_ONCE) {
        const int64_t num = std::min(TILES_AT_ONCE * LANES, task.num - t * LANES);
        score(groups, n, queries + t * packed, num, scores, ahead_values);
        for (int64_t c = 0; c < num; c += LANES) {
          const int64_t first = t * LANES + c, count = std::min<int64_t>(LANES, num - c);
          alignas(64) float factor[LANES];
          softmax(scores + c * SPAN, start, n, columns, first, count, Values::place(weights, c, 0), factor,
                  ahead_values);
          for (int64_t i = 0; start > 0 && i < count; ++i)
            if (factor[i] != 1.0f) rescale(column_acc(acc, first + i), factor[i]);
        }
        if (!values) values = Values::pack(here.rows, value_offset, n, d, ahead_keys);
        Values::accumulate(values, n, d, weights, num, acc + t * acc_size(d), start > 0, ahead_keys);
      }
    }
    finish_columns(task, columns, acc);
  }

  void find_first(const Task& task, Span& span) const {
    const int32_t* tile = tiles + task.tile * TILE_SIZE;
    find(tile, task.head, tile[KV_START], tile[KV_END], span);
  }

  // A column's acc: [d / 16] vectors, BLOCK apart.
  void rescale(float* acc, float factor) const {
    for (int64_t i = 0; i < head_dim; i += LANES, acc += BLOCK) store(acc, load(acc) * factor);
  }

  // Packs the queries and fetches what earlier tiles have left; returns where the last of the columns stops to see.
  int64_t start_columns(const Task& task, Columns& columns, typename Engine::Packed* queries, float* acc) const {
    const int32_t* tile = tiles + task.tile * TILE_SIZE;
    const int64_t group = num_heads / num_kv_heads, d = head_dim, packed = Engine::packed_size(d);
    int64_t end = 0, row = tile[ROW_START] + task.first / group, head = task.first % group;
    for (int64_t t = 0; t < task.num; t += LANES, queries += packed) {
      const T* rows[LANES] = {};
      for (int64_t c = t; c < std::min<int64_t>(task.num, t + LANES); ++c) {
        columns.row[c] = row, columns.position[c] = positions[row];
        columns.place[c] = row * num_heads + task.head * group + head;
        rows[c - t] = q + columns.place[c] * d;
        end = std::max<int64_t>(end, positions[row] + 1);
        if (++head == group) head = 0, ++row;
      }
      Engine::pack(rows, d, queries);
      store(columns.m + t, broadcast(-INFINITY)), store(columns.l + t, f32x16{});
    }
    for (int64_t c = 0; c < task.num && tile[KV_START] > 0; ++c) {
      const float* saved = state + columns.place[c] * (d + 2);
      for (int64_t i = 0; i < d; i += LANES) store(column_acc(acc, c) + i * LANES, load_some(saved + i, d - i));
      columns.m[c] = saved[d], columns.l[c] = saved[d + 1];
    }
    return std::min<int64_t>(end, tile[KV_END]);
  }

  float* column_acc(float* acc, int64_t c) const {
    return acc + c / LANES * acc_size(head_dim) + c % LANES * LANES;
  }

  // Results of the rows that end here, or what their next tiles will need.
  void finish_columns(const Task& task, const Columns& columns, float* acc) const {
    const int64_t d = head_dim;
    for (int64_t c = 0; c < task.num; ++c) {
      const float* from = column_acc(acc, c);
      if (!state || last_level[columns.row[c]] == tiles[task.tile * TILE_SIZE + LEVEL]) {
        T* to = out + columns.place[c] * d;
        const float share = 1.0f / columns.l[c];
        for (int64_t i = 0; i < d; i += LANES) store_some(to + i, load(from + i * LANES) * share, d - i);
      } else {
        float* saved = state + columns.place[c] * (d + 2);
        for (int64_t i = 0; i < d; i += LANES) store_some(saved + i, load(from + i * LANES), d - i);
        saved[d] = columns.m[c], saved[d + 1] = columns.l[c];
      }
    }
  }
};

}  // namespace nanoapc
