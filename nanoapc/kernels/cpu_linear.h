// Linear layers, y = x W^T + b.
//
// Weights are read where they lie, in panels of 32 rows: two groups of 16. What becomes of a panel's products
//
//     c [2 groups of 16 outputs][16 tokens]
//
// is up to `Outputs`: they are stored (Plain), or the first group gates the second (Gated).
//
// Invariant: an output is one chain of additions in ascending order (see cpu_matrix.h), whatever else is computed.

#pragma once

#include <ATen/core/Tensor.h>

#include "cpu_matrix.h"

namespace nanoapc {

using at::Tensor;

#ifdef NANOAPC_AMX

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

#endif

template <typename T> struct Plain {
  static constexpr int64_t WIDTH = 2 * LANES;  // outputs of a panel
  const T* bias;                               // [outputs] or nullptr
  T* out;                                      // [token][outputs]
  int64_t num_outputs;

  void groups(const T* weight, int64_t width, int64_t panel, const T** groups) const {
    groups[0] = weight + panel * WIDTH * width, groups[1] = groups[0] + LANES * width;
  }

  void store(float* c, int64_t panel, int64_t token, int64_t num_tokens) const {
    const int64_t first = panel * WIDTH, n = std::min(WIDTH, num_outputs - first);
    T* to = out + token * num_outputs + first;
    for (int64_t i = 0; bias && i < n; ++i) add(c + i * LANES, bias[first + i]);
#ifdef NANOAPC_AMX
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (n == WIDTH) return transpose_to_bf16(c, to, num_outputs, num_tokens);
#endif
    alignas(64) float rows[LANES][LANES];
    for (int64_t i = 0; i < n; i += LANES) {
      transpose(c + i * LANES, rows[0], LANES, num_tokens);
      for (int64_t t = 0; t < num_tokens; ++t) store_some(to + t * num_outputs + i, load(rows[t]), n - i);
    }
  }
  static void add(float* c, float bias) { nanoapc::store(c, load(c) + bias); }
};

// The weight's first half gates its second: out = silu(gate) * up, each rounded to T on the way.
template <typename T> struct Gated {
  static constexpr int64_t WIDTH = LANES;
  const T* bias;  // [2 * outputs] or nullptr
  T* out;         // [token][outputs]
  int64_t num_outputs;

  void groups(const T* weight, int64_t width, int64_t panel, const T** groups) const {
    groups[0] = weight + panel * WIDTH * width, groups[1] = groups[0] + num_outputs * width;
  }

  void store(float* c, int64_t panel, int64_t token, int64_t num_tokens) const {
    const int64_t first = panel * WIDTH;
    alignas(64) float rows[LANES][LANES];
    for (int i = 0; i < LANES; ++i) {
      f32x16 gate = load(c + i * LANES), up = load(c + BLOCK + i * LANES);
      if (bias) gate += float(bias[first + i]), up += float(bias[num_outputs + first + i]);
      gate = round_to<T>(gate), up = round_to<T>(up);
      nanoapc::store(c + i * LANES, round_to<T>(gate / (exp2(gate * -LOG2_E) + 1.0f)) * up);
    }
    transpose(c, rows[0], LANES, num_tokens);
    for (int64_t t = 0; t < num_tokens; ++t) nanoapc::store(out + (token + t) * num_outputs + first, load(rows[t]));
  }
};

// Tokens are packed a batch at a time. Then threads take pieces of the product: a chunk of 512 tokens times a stripe of a
// few panels, which stays in the second-level cache while the chunk passes by.
template <typename Engine, typename Outputs>
void linear_rows(const Tensor& x, const Tensor& weight, const Outputs& outputs) {
  using T = typename Engine::Element;
  using Packed = typename Engine::Packed;
  constexpr int64_t STEP = Engine::TILES_AT_ONCE, CHUNK = 32;  // tiles of 16 tokens
  const int64_t num_tokens = x.size(0), k = x.size(1), width = weight.size(1), packed = Engine::packed_size(k);
  const int64_t panels = (outputs.num_outputs + Outputs::WIDTH - 1) / Outputs::WIDTH;
  const int64_t fit = std::clamp<int64_t>((768 << 10) / (2 * LANES * width * int64_t(sizeof(T))), 1, 8);
  const int64_t stripe = std::clamp<int64_t>(panels / (4 * at::get_num_threads()), 1, fit);
  const int64_t stripes = (panels + stripe - 1) / stripe;
  const int64_t batch = std::max<int64_t>((16 << 20) / (packed * int64_t(sizeof(Packed))) / CHUNK, 1) * CHUNK * LANES;
  const T *xp = x.const_data_ptr<T>(), *wp = weight.const_data_ptr<T>();
  for (int64_t begin = 0; begin < num_tokens; begin += batch) {
    const int64_t count = std::min(batch, num_tokens - begin), tiles = (count + LANES - 1) / LANES;
    auto* columns = scratch<Packed>(COLUMNS, tiles * packed);
    for_each(tiles, 1 + (1 << 15) / packed, [&](auto&& take) {
      take([&](int64_t t, int64_t) {
        const T* rows[LANES] = {};
        for (int64_t c = 0; c < std::min<int64_t>(LANES, count - t * LANES); ++c)
          rows[c] = xp + (begin + t * LANES + c) * x.stride(0);
        Engine::pack(rows, k, columns + t * packed);
      });
    });
    for_each((tiles + CHUNK - 1) / CHUNK * stripes, 1, [&](auto&& take) {
      typename Engine::Session session;
      float* c = scratch<float>(RESULT, STEP * 2 * BLOCK);
      take([&](int64_t piece, int64_t) {
        const int64_t first_panel = piece % stripes * stripe, first_tile = piece / stripes * CHUNK;
        for (int64_t first = first_tile; first < std::min(tiles, first_tile + CHUNK); first += STEP)
          for (int64_t p = first_panel; p < std::min(panels, first_panel + stripe); ++p) {
            const T* groups[2];
            outputs.groups(wp, width, p, groups);
            const int64_t num = std::min(STEP, tiles - first);
            Engine::multiply(groups, 2, width, k, columns + first * packed, num, c, 2 * BLOCK);
            for (int64_t t = 0; t < num; ++t) {
              const int64_t token = (first + t) * LANES;
              outputs.store(c + t * 2 * BLOCK, p, begin + token, std::min<int64_t>(LANES, count - token));
            }
          }
      });
    });
  }
}

}  // namespace nanoapc
