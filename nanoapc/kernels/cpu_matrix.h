// The two engines that multiply matrices: plain vector code, and Intel's AMX tiles.
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

#include "cpu_vector.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VBMI2__) && \
    defined(__linux__)
#define NANOAPC_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanoapc {

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

// GCC's tile loads do not tell it that they read memory; it would be free to delay or drop the stores before them.
inline INLINED void finish_stores() { asm volatile("" ::: "memory"); }

// Blocks of C: A tiles [16 rows][32 k] times B tiles [16 pairs of k][16 columns][2], `steps` of 32 k; the first B tile
// of a step is at b(step). All tiles of a step are loaded before its products.
//
// While the matrix unit works, the vector unit and the memory are idle, but the processor finds what they could do
// meanwhile only among the next few hundred instructions. So that is cut in eight: aside(step, 0), ..., aside(step, 7).
template <int NA, int NB, typename B, typename Aside>
inline void multiply_tiles(const c10::BFloat16* const* a, int64_t a_row, int64_t a_step, B b, int64_t b_tile,
                           int64_t steps, float* c, int64_t c_a, int64_t c_b, bool add, Aside aside) {
  const c10::BFloat16 *a0 = a[0], *a1 = a[NA - 1];
  float *c01 = c + c_b, *c10 = c + c_a, *c11 = c + c_a + c_b;
  if (add) {
    finish_stores();
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
    const c10::BFloat16* b0 = b(s);
    finish_stores();
    _tile_loadd(4, a0 + s * a_step, a_row * 2);
    aside(s, 0);
    _tile_loadd(6, b0, 64);
    aside(s, 1);
    if constexpr (NA > 1) _tile_loadd(5, a1 + s * a_step, a_row * 2);
    aside(s, 2);
    if constexpr (NB > 1) _tile_loadd(7, b0 + b_tile, 64);
    aside(s, 3);
    _tile_dpbf16ps(0, 4, 6);
    aside(s, 4);
    if constexpr (NA > 1) _tile_dpbf16ps(2, 5, 6);
    aside(s, 5);
    if constexpr (NB > 1) _tile_dpbf16ps(1, 4, 7);
    aside(s, 6);
    if constexpr (NA > 1 && NB > 1) _tile_dpbf16ps(3, 5, 7);
    aside(s, 7);
  }
  _tile_stored(0, c, 64);
  if constexpr (NB > 1) _tile_stored(1, c01, 64);
  if constexpr (NA > 1) _tile_stored(2, c10, 64);
  if constexpr (NA > 1 && NB > 1) _tile_stored(3, c11, 64);
}

// Beside a product whose B lies in the caches, steps b_step elements apart: a line every 1024 bytes is fetched four
// steps ahead, which draws the next ones after it; more would only delay the loads.
struct FetchAhead {
  const c10::BFloat16* b;
  int64_t b_step;

  INLINED void operator()(int64_t s, int part) const {
    if (part == 0)
      for (int64_t i = 0; i < b_step; i += 32 * LANES) __builtin_prefetch(b + (s + 4) * b_step + i);
  }
};

template <int NA, int NB>
inline void multiply_tiles(const c10::BFloat16* const* a, int64_t a_row, int64_t a_step, const c10::BFloat16* b,
                           int64_t b_tile, int64_t b_step, int64_t steps, float* c, int64_t c_a, int64_t c_b,
                           bool add) {
  auto at = [=](int64_t s) { return b + s * b_step; };
  multiply_tiles<NA, NB>(a, a_row, a_step, at, b_tile, steps, c, c_a, c_b, add, FetchAhead{b, b_step});
}

struct AmxEngine {
  using Element = c10::BFloat16;
  using Packed = c10::BFloat16;
  static constexpr int K_MULTIPLE = 32;

  struct Session {  // all eight tile registers as 16 rows of 64 bytes
    Session() {
      // Static, because compilers do not see that the instruction reads more than a word of it.
      alignas(64) static constexpr uint8_t config[64] = {
          1,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,   // palette
          64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,  64, 0,   // bytes a row
          0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
          16, 16, 16, 16, 16, 16, 16, 16, 0,  0,  0,  0,  0,  0,  0,  0};  // rows
      _tile_loadconfig(config);
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
