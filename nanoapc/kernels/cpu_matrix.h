// Vectors of 16 lanes, and the two engines that multiply matrices: plain vector code, and Intel's AMX tiles.
//
// Both compute C = A * X^T, where A's rows lie in memory as they are (a weight, the keys of a KV block) and the
// few rows of X (tokens, queries) are packed once, 16 of them side by side, as the columns of "column tiles":
//
//              k                     16 columns                 C[t]  one 16 x 16 block per group of A's rows
//     A  [16 rows][k]     X^T[t]  [k]  x x x ...                      and column tile t
//
// Invariant: an element of C is one chain of additions over k in ascending order that starts from zero. It does not
// depend on how many rows or columns there are, on its place among them, or on the number of threads.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__)
#define NANOAPC_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanoapc {

constexpr int LANES = 16;              // floats of a vector, columns of a column tile, rows of a group
constexpr int BLOCK = LANES * LANES;   // floats of one block of C

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

// ---- loads, stores, elementary functions ----

template <typename V> inline V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline f32x16 broadcast(float x) { return x - f32x16{}; }

inline f32x16 load(const float* p) { return load_raw<f32x16>(p); }
inline f32x16 from_bf16(u16x16 v) {
#ifdef __AVX512BF16__
  return (f32x16)((u32x16)_mm512_cvtepu16_epi32((__m256i)v) << 16);
#else
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
#endif
}
inline f32x16 load(const c10::BFloat16* p) { return from_bf16(load_raw<u16x16>(p)); }
inline f32x16 load(const c10::Half* p) {
  f32x16 v;
  for (int i = 0; i < LANES; ++i) v[i] = p[i];
  return v;
}

inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
inline u16x16 to_bf16(f32x16 v) {  // round to nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40, u16x16);
#endif
}
inline void store(c10::BFloat16* p, f32x16 v) {
  const u16x16 out = to_bf16(v);
  std::memcpy(p, &out, sizeof out);
}
inline void store(c10::Half* p, f32x16 v) {
  for (int i = 0; i < LANES; ++i) p[i] = v[i];
}

template <typename T> inline f32x16 load_some(const T* p, int64_t n) {  // lanes from n on are zero
  if (n >= LANES) return load(p);
  T buffer[LANES] = {};
  std::memcpy((void*)buffer, p, n * sizeof(T));
  return load(buffer);
}
template <typename T> inline void store_some(T* p, f32x16 v, int64_t n) {
  if (n >= LANES) return store(p, v);
  T buffer[LANES];
  store(buffer, v);
  std::memcpy((void*)p, buffer, n * sizeof(T));
}
template <typename From, typename To> inline void convert(const From* in, int64_t n, To* out) {
  for (int64_t i = 0; i < n; i += LANES) store_some(out + i, load_some(in + i, n - i), n - i);
}
template <typename T> inline f32x16 round_to(f32x16 v) {  // v as it would be after a store as T
  if constexpr (std::is_same_v<T, float>) return v;
  if constexpr (std::is_same_v<T, c10::BFloat16>) return from_bf16(to_bf16(v));
  T buffer[LANES];
  store(buffer, v);
  return load(buffer);
}

inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline float sum_lanes(f32x16 v) {  // lanes i and i + 8, then i and i + 4, ...
  float x[LANES];
  store(x, v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

// e^x within 2e-7 relative; exactly 1 at 0 and exactly 0 below -87 (also at -inf).
inline f32x16 exp(f32x16 x) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  f32x16 capped = x < 88.0f ? x : broadcast(88.0f);
  f32x16 shifted = capped * 1.44269504f + shifter;
  f32x16 n = shifted - shifter;
  f32x16 r = capped - n * 0.693359375f - n * -2.12194440e-4f;
  f32x16 p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  f32x16 result = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
  result = x < -87.0f ? f32x16{} : result;
  return x == x ? result : x;
}

// ---- threads and scratch memory ----

// Hands out [0, n) to torch's threads, `grain` at a time to whoever is free. work(take) runs once in each thread and
// calls take(item), which calls item(i) for each i that the thread gets.
template <typename Work> void for_each(int64_t n, int64_t grain, const Work& work) {
  const int64_t pieces = (n + grain - 1) / grain;
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), pieces);
  std::atomic<int64_t> next{0};
  auto run = [&](int64_t, int64_t) {
    work([&](auto&& item) {
      for (int64_t i; (i = next.fetch_add(1)) < pieces;)
        for (int64_t j = i * grain; j < std::min(n, (i + 1) * grain); ++j) item(j);
    });
  };
  if (workers <= 1) return run(0, 1);
  at::parallel_for(0, workers, 1, run);
}

// A thread's own memory, kept and grown; one buffer per purpose.
enum Purpose { COLUMNS, RESULT, CONVERTED, QUERIES, SCORES, WEIGHTS, VALUES, ACCUMULATOR, NUM_PURPOSES };

inline void* scratch_bytes(Purpose purpose, size_t num_bytes) {
  struct Buffer {
    void* memory = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(memory); }
  };
  thread_local Buffer buffers[NUM_PURPOSES];
  Buffer& buffer = buffers[purpose];
  const size_t bytes = (num_bytes + 4095) / 4096 * 4096;
  if (buffer.size < bytes) {
    std::free(buffer.memory);
    buffer.memory = std::aligned_alloc(4096, bytes);
    buffer.size = buffer.memory ? bytes : 0;
    if (!buffer.memory) throw std::bad_alloc();
  }
  return buffer.memory;
}
template <typename T> T* scratch(Purpose purpose, size_t n) {
  return static_cast<T*>(scratch_bytes(purpose, n * sizeof(T)));
}

// ---- the vector engine: any type, any machine; products of float32 ----

#ifdef __AVX512F__
constexpr int ROWS = 8;  // rows of A whose sums live in registers together, for one or two column tiles
#else
constexpr int ROWS = 4;
#endif

// c[r][16 columns] (+)= sum over k of a[r * row_stride + k * k_stride] * b[k][16 columns]; R rows, N column tiles
template <int R, int N>
inline void multiply_block(const float* a, int64_t row_stride, int64_t k_stride, int64_t num_k, const float* b,
                           int64_t b_stride, float* c, int64_t c_stride, bool add) {
  f32x16 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = add ? load(c + n * c_stride + r * LANES) : f32x16{};
  for (int64_t k = 0; k < num_k; ++k) {
    f32x16 column[N];
    for (int n = 0; n < N; ++n) column[n] = load(b + n * b_stride + k * LANES);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] += a[r * row_stride + k * k_stride] * column[n];
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(c + n * c_stride + r * LANES, sum[r][n]);
}

// The same for any number of rows and column tiles.
inline void multiply_rows(const float* a, int64_t row_stride, int64_t k_stride, int64_t num_k, const float* b,
                          int64_t b_stride, float* c, int64_t c_stride, int64_t num_rows, int64_t num_tiles, bool add) {
  for (int64_t t = 0; t < num_tiles; t += 2) {
    const bool pair = t + 1 < num_tiles;
    const float* bt = b + t * b_stride;
    float* ct = c + t * c_stride;
    int64_t r = 0;
    for (; r + ROWS <= num_rows; r += ROWS)
      (pair ? multiply_block<ROWS, 2> : multiply_block<ROWS, 1>)(a + r * row_stride, row_stride, k_stride, num_k, bt,
                                                                 b_stride, ct + r * LANES, c_stride, add);
    for (; r < num_rows; ++r)
      (pair ? multiply_block<1, 2> : multiply_block<1, 1>)(a + r * row_stride, row_stride, k_stride, num_k, bt,
                                                           b_stride, ct + r * LANES, c_stride, add);
  }
}

template <typename T> struct VectorEngine {
  using Element = T;
  using Packed = float;
  static constexpr int K_MULTIPLE = 1;
  static constexpr int TILES_AT_ONCE = 8;
  struct Session {  // what a thread has to hold while it multiplies
    ~Session() {}
  };

  static int64_t packed_size(int64_t k) { return k * LANES; }

  // rows[16] (nullptr: zeros) of k elements -> one column tile
  static void pack(const T* const* rows, int64_t k, float* out) {
    for (int c = 0; c < LANES; ++c)
      for (int64_t i = 0; i < k; ++i) out[i * LANES + c] = rows[c] ? static_cast<float>(rows[c][i]) : 0.0f;
  }

  // C[t][g] for each group g of 16 rows of A and each column tile t; c_stride is the distance from tile to tile
  static void multiply(const T* const* groups, int64_t num_groups, int64_t row_stride, int64_t k, const float* columns,
                       int64_t num_tiles, float* c, int64_t c_stride) {
    for (int64_t g = 0; g < num_groups; ++g) {
      const float* a;
      int64_t stride = row_stride;
      if constexpr (std::is_same_v<T, float>) {
        a = groups[g];
      } else {
        float* converted = scratch<float>(CONVERTED, LANES * k);
        for (int r = 0; r < LANES; ++r) convert(groups[g] + r * row_stride, k, converted + r * k);
        a = converted;
        stride = k;
      }
      multiply_rows(a, stride, 1, k, columns, packed_size(k), c + g * BLOCK, c_stride, LANES, num_tiles, false);
    }
  }
};

// ---- the AMX engine: bfloat16 products, float32 sums ----

inline bool amx_available() {  // Linux gives a process the tile registers only when it asks
#ifdef NANOAPC_AMX
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
#else
  return false;
#endif
}

#ifdef NANOAPC_AMX

// r[i] lane j <-> r[j] lane i, lanes of 32 bits
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// lane j of the result: (low[j], high[j]) as a pair of bfloat16
inline __m512i pair_lanes(f32x16 low, f32x16 high) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), pairs);
}

// in: 32 vectors of 16 columns -> out[16 columns][32] bfloat16, out_stride elements from column to column
inline void transpose_to_bf16(const float* in, c10::BFloat16* out, int64_t out_stride, int num_columns = LANES) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = pair_lanes(load(in + 2 * i * LANES), load(in + (2 * i + 1) * LANES));
  transpose(r);
  for (int i = 0; i < num_columns; ++i) _mm512_storeu_si512(out + i * out_stride, r[i]);
}

// Blocks of C: A tiles [16 rows][32 k] times B tiles [16 pairs of k][16 columns][2], `steps` of 32 k.
template <int NA, int NB>
inline void multiply_tiles(const c10::BFloat16* const* a, int64_t a_row, int64_t a_step, const c10::BFloat16* b,
                           int64_t b_tile, int64_t b_step, int64_t steps, float* c, int64_t c_a, int64_t c_b, bool add) {
  const c10::BFloat16 *a0 = a[0], *a1 = a[NA - 1], *b1 = b + (NB - 1) * b_tile;
  float *c01 = c + c_b, *c10 = c + c_a, *c11 = c + c_a + c_b;
  if (add) {
    _tile_loadd(0, c, 64);
    if constexpr (NB > 1) _tile_loadd(1, c01, 64);
    if constexpr (NA > 1) _tile_loadd(2, c10, 64);
    if constexpr (NA > 1 && NB > 1) _tile_loadd(3, c11, 64);
  } else {
    _tile_zero(0);
    if constexpr (NB > 1) _tile_zero(1);
    if constexpr (NA > 1) _tile_zero(2);
    if constexpr (NA > 1 && NB > 1) _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, b + s * b_step, 64);
    _tile_loadd(4, a0 + s * a_step, a_row * 2);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NB > 1) {
      _tile_loadd(7, b1 + s * b_step, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (NA > 1) {
      _tile_loadd(5, a1 + s * a_step, a_row * 2);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (NB > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  if constexpr (NB > 1) _tile_stored(1, c01, 64);
  if constexpr (NA > 1) _tile_stored(2, c10, 64);
  if constexpr (NA > 1 && NB > 1) _tile_stored(3, c11, 64);
}

struct AmxEngine {
  using Element = c10::BFloat16;
  using Packed = c10::BFloat16;
  static constexpr int K_MULTIPLE = 32;
  static constexpr int TILES_AT_ONCE = 2;

  struct Session {  // all eight tile registers as 16 rows of 64 bytes
    Session() {
      struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
      } config;
      for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
  };

  static int64_t packed_size(int64_t k) { return (k + 31) / 32 * 32 * LANES; }

  static void pack(const Element* const* rows, int64_t k, Packed* out) {
    for (int64_t i = 0; i < k; i += 32, out += 32 * LANES) {
      const __mmask32 mask = k - i >= 32 ? ~0u : (1u << (k - i)) - 1;
      __m512i r[16];
      for (int c = 0; c < LANES; ++c)
        r[c] = rows[c] ? _mm512_maskz_loadu_epi16(mask, rows[c] + i) : _mm512_setzero_si512();
      transpose(r);
      for (int p = 0; p < LANES; ++p) _mm512_store_si512(out + p * 32, r[p]);
    }
  }

  static void multiply(const Element* const* groups, int64_t num_groups, int64_t row_stride, int64_t k,
                       const Packed* columns, int64_t num_tiles, float* c, int64_t c_stride) {
    const int64_t tile = packed_size(k), steps = (k + 31) / 32;
    for (int64_t g = 0; g < num_groups; g += 2) {
      const bool two = g + 1 < num_groups;
      for (int64_t next = g + 2; next < std::min(g + 4, num_groups); ++next)  // keys lie in pages of their own
        for (int64_t i = 0; i < LANES * row_stride; i += 32) __builtin_prefetch(groups[next] + i);
      for (int64_t t = 0; t < num_tiles; t += 2) {
        const bool pair = t + 1 < num_tiles;
        auto* block = two ? (pair ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                          : (pair ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
        block(groups + g, row_stride, 32, columns + t * tile, tile, 32 * LANES, steps, c + t * c_stride + g * BLOCK,
              BLOCK, c_stride, false);
      }
    }
  }
};

#endif

}  // namespace nanoapc
