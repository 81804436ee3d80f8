// Vectors of 16 floats, whatever the machine has to hold them: loads, stores, elementary functions; dtypes; threads;
// scratch memory.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace nanoapc {

using at::Tensor;

#define INLINED __attribute__((always_inline))  // of a lambda or a function: also where the compiler sees no use in it

constexpr int LANES = 16;              // floats of a vector, columns of a column tile, rows of a group
constexpr int BLOCK = LANES * LANES;   // floats of a square of them

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

// a > b ? a : b, so b if one is NaN; min alike
#ifdef __AVX512F__
inline f32x16 max(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
inline f32x16 min(f32x16 a, f32x16 b) { return (f32x16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }
#endif
inline i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// over all lanes: i and i + 8, then i and i + 4, ...
#ifdef __AVX512F__
inline float sum_lanes(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
inline float max_lanes(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
template <typename F> inline float fold_lanes(f32x16 v, const F& f) {
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = f(v[i], v[i + width]);
  return v[0];
}
inline float sum_lanes(f32x16 v) {
  return fold_lanes(v, [](float a, float b) { return a + b; });
}
inline float max_lanes(f32x16 v) {
  return fold_lanes(v, [](float a, float b) { return a > b ? a : b; });
}
#endif

// 2^x within 2e-7 relative, exactly 1 at 0; x is taken for -126 below that and for 127 above that.
inline f32x16 exp2(f32x16 x) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  const f32x16 capped = min(broadcast(127.0f), max(broadcast(-126.0f), x));  // NaN stays NaN
  const f32x16 shifted = capped + shifter, whole = shifted - shifter, rest = capped - whole;
  // (2^r - 1) / r on [-0.5, 0.5], by least squares with the weights shifted until the error is even (minimax)
  f32x16 p = rest * 0.001326472731f + 0.009671512991f;
  p = p * rest + 0.05550733581f;
  p = p * rest + 0.2402224243f;
  p = p * rest + 0.6931470037f;
  p = p * rest + 1.0f;
#ifdef __AVX512F__
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const f32x16 result = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
  return x == x ? result : x;
#endif
}
constexpr float LOG2_E = 1.4426950408889634f;

#ifdef __AVX512F__
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
#endif

// in [16][16] -> out [column][16] for the first columns
inline void transpose(const float* in, float* out, int64_t out_stride, int64_t num_columns) {
#ifdef __AVX512F__
  __m512i r[LANES];
  for (int i = 0; i < LANES; ++i) r[i] = _mm512_loadu_si512(in + i * LANES);
  transpose(r);
  for (int64_t c = 0; c < num_columns; ++c) _mm512_storeu_si512(out + c * out_stride, r[c]);
#else
  for (int64_t c = 0; c < num_columns; ++c)
    for (int i = 0; i < LANES; ++i) out[c * out_stride + i] = in[i * LANES + c];
#endif
}

// ---- dtypes, threads and scratch memory ----

template <typename F> void for_dtype(const Tensor& x, const F& f) {
  if (x.scalar_type() == at::kFloat) return f(float{});
  if (x.scalar_type() == at::kBFloat16) return f(c10::BFloat16{});
  if (x.scalar_type() == at::kHalf) return f(c10::Half{});
  TORCH_CHECK(false, "the CPU kernels take float32, bfloat16 or float16, not ", x.scalar_type());
}

// Calls f(row) for each row, on several threads once there is enough to do.
template <typename F> void for_rows(int64_t num_rows, int64_t row_size, const F& f) {
  at::parallel_for(0, num_rows, std::max<int64_t>(1, (1 << 14) / row_size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Hands out [0, n) to torch's threads, `grain` at a time to whoever is free. work(take) runs once in each thread and
// calls take(item), which calls item(i, next) for each i that the thread gets; next: what it gets after it, or -1.
template <typename Work> void for_each(int64_t n, int64_t grain, const Work& work) {
  const int64_t pieces = (n + grain - 1) / grain;
  const int64_t workers = std::min<int64_t>(at::get_num_threads(), pieces);
  std::atomic<int64_t> counter{0};
  auto run = [&](int64_t, int64_t) {
    work([&](auto&& item) {
      for (int64_t piece = counter.fetch_add(1), next; piece < pieces; piece = next) {
        next = counter.fetch_add(1);
        const int64_t end = std::min(n, (piece + 1) * grain), following = next < pieces ? next * grain : -1;
        for (int64_t i = piece * grain; i < end; ++i) item(i, i + 1 < end ? i + 1 : following);
      }
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

}  // namespace nanoapc
