// Linear layers, y = x W^T + b.
//
// A weight is read in panels of 32 rows, two groups of 16. What becomes of the products of a token with a panel,
// (low, high) = its 16 + 16 outputs, is up to `Outputs`: they are stored (Plain), or low gates high (Gated).
//
// With AMX a weight is packed once into the tiles that the matrix unit takes as its right side, in the order in which
// they are read, so that memory gives them in one stream; the tokens are its left side as they are:
//
//     packed weight  [panel][k / 32][2 groups]: [16 pairs of k][16 outputs][2]
//
// Without AMX, or for a weight that somebody else needs as it is (a tied embedding), it is read where it lies.
//
// Invariant: an output is one chain of additions in ascending order (see cpu_matrix.h), whatever else is computed and
// whichever way the weight is read.

#pragma once

#include "cpu_matrix.h"

namespace nanoapc {

template <typename T> struct Plain {
  static constexpr int64_t WIDTH = 2 * LANES;  // outputs of a panel
  const T* bias;                               // [outputs] or nullptr
  T* out;                                      // [token][outputs]
  int64_t num_outputs;

  // First row of a panel's second group of 16, counted from the first of its first.
  int64_t second_group() const { return LANES; }

  void store_row(f32x16 low, f32x16 high, int64_t panel, int64_t token) const {
    const int64_t first = panel * WIDTH, n = num_outputs - first;
    T* to = out + token * num_outputs + first;
    if (bias) low += load_some(bias + first, n);
    store_some(to, low, n);
    if (n <= LANES) return;
    if (bias) high += load_some(bias + first + LANES, n - LANES);
    store_some(to + LANES, high, n - LANES);
  }
};

// The weight's first half gates its second: out = silu(gate) * up, each rounded to T on the way.
template <typename T> struct Gated {
  static constexpr int64_t WIDTH = LANES;
  const T* bias;  // [2 * outputs] or nullptr
  T* out;         // [token][outputs]
  int64_t num_outputs;

  int64_t second_group() const { return num_outputs; }

  void store_row(f32x16 gate, f32x16 up, int64_t panel, int64_t token) const {
    const int64_t first = panel * WIDTH;
    if (bias) gate += load(bias + first), up += load(bias + num_outputs + first);
    gate = round_to<T>(gate), up = round_to<T>(up);
    store(out + token * num_outputs + first, round_to<T>(gate / (exp2(gate * -LOG2_E) + 1.0f)) * up);
  }
};

// Cuts a product into pieces for the threads: a chunk of 512 tokens times a stripe of a few panels, which stays in the
// second-level cache while the chunk passes by. work(tile, end tile, panel, end panel), tiles of 16 tokens.
template <typename Engine, typename Work>
void for_pieces(int64_t tiles, int64_t panels, int64_t panel_bytes, const Work& work) {
  constexpr int64_t CHUNK = 32;
  const int64_t fit = std::clamp<int64_t>((768 << 10) / panel_bytes, 1, 8);
  const int64_t stripe = std::clamp<int64_t>(panels / (4 * at::get_num_threads()), 1, fit);
  const int64_t stripes = (panels + stripe - 1) / stripe;
  for_each((tiles + CHUNK - 1) / CHUNK * stripes, 1, [&](auto&& take) {
    typename Engine::Session session;
    take([&](int64_t piece, int64_t) {
      const int64_t tile = piece / stripes * CHUNK, panel = piece % stripes * stripe;
      work(tile, std::min(tiles, tile + CHUNK), panel, std::min(panels, panel + stripe));
    });
  });
}

// The weight is read where it lies; tokens are packed, a batch at a time.
template <typename Engine, typename Outputs>
void linear_in_place(const Tensor& x, const Tensor& weight, const Outputs& outputs) {
  using T = typename Engine::Element;
  using Packed = typename Engine::Packed;
  constexpr int64_t STEP = Engine::TILES_AT_ONCE;
  const int64_t num_tokens = x.size(0), k = x.size(1), width = weight.size(1), packed = Engine::packed_size(k);
  const int64_t panels = (outputs.num_outputs + Outputs::WIDTH - 1) / Outputs::WIDTH;
  const int64_t batch = std::max<int64_t>((16 << 20) / (packed * int64_t(sizeof(Packed))) / 32, 1) * 32 * LANES;
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
    auto work = [&](int64_t tile, int64_t end_tile, int64_t panel, int64_t end_panel) {
      float* c = scratch<float>(RESULT, STEP * 2 * BLOCK);  // [tile][2 groups][16 outputs][16 tokens]
      alignas(64) float rows[2][BLOCK];                     // [16 tokens][16 outputs]
      for (int64_t first = tile; first < end_tile; first += STEP)
        for (int64_t p = panel; p < end_panel; ++p) {
          const T* groups[2] = {wp + p * Outputs::WIDTH * width};
          groups[1] = groups[0] + outputs.second_group() * width;
          const int64_t num = std::min(STEP, end_tile - first);
          Engine::multiply(groups, 2, width, k, columns + first * packed, num, c, 2 * BLOCK);
          for (int64_t t = 0; t < num; ++t) {
            const int64_t token = (first + t) * LANES, n = std::min<int64_t>(LANES, count - token);
            for (int h = 0; h < 2; ++h) transpose(c + (2 * t + h) * BLOCK, rows[h], LANES, n);
            for (int64_t i = 0; i < n; ++i)
              outputs.store_row(load(rows[0] + i * LANES), load(rows[1] + i * LANES), p, begin + token + i);
          }
        }
    };
    for_pieces<Engine>(tiles, panels, 2 * LANES * width * sizeof(T), work);
  }
}

#ifdef NANOAPC_AMX

// weight [rows, k], both multiples of 32 -> packed (see above); gated: a panel is 16 rows of each half
inline void pack_weight(const c10::BFloat16* weight, int64_t num_rows, int64_t k, bool gated, c10::BFloat16* out) {
  const int64_t second = gated ? num_rows / 2 : LANES, width = gated ? LANES : 2 * LANES;
  at::parallel_for(0, num_rows / 32, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t i = 0; i < k; i += 32)
        for (int64_t h = 0; h < 2; ++h) {
          const c10::BFloat16* rows[LANES];
          for (int64_t r = 0; r < LANES; ++r) rows[r] = weight + (p * width + h * second + r) * k + i;
          AmxEngine::pack(rows, 32, out + p * 32 * k + i * 32 + h * 32 * LANES);
        }
  });
}

// x [T, k], k a multiple of 32
template <typename Outputs>
void linear_packed(const Tensor& x, const Tensor& packed, const Outputs& outputs) {
  using T = c10::BFloat16;
  const int64_t num_tokens = x.size(0), k = x.size(1), tiles = (num_tokens + LANES - 1) / LANES;
  const int64_t stride = num_tokens > 1 ? x.stride(0) : k;
  const T *xp = x.const_data_ptr<T>(), *wp = packed.const_data_ptr<T>();
  T* tail = scratch<T>(COLUMNS, LANES * stride);  // the last tile, if it is not full: what it lacks is read, but not used
  for (int64_t i = num_tokens / LANES * LANES; i < num_tokens; ++i)
    std::memcpy((void*)(tail + i % LANES * stride), xp + i * stride, k * sizeof(T));
  auto work = [&](int64_t tile, int64_t end_tile, int64_t panel, int64_t end_panel) {
    float* c = scratch<float>(RESULT, 4 * BLOCK);  // [2 tiles][2 groups][16 tokens][16 outputs]
    for (int64_t t = tile; t < end_tile; t += 2)
      for (int64_t p = panel; p < end_panel; ++p) {
        const bool two = t + 1 < end_tile;
        const T* a[2];
        for (int64_t i = 0; i < 1 + two; ++i) a[i] = (t + i + 1) * LANES > num_tokens ? tail : xp + (t + i) * LANES * stride;
        auto* multiply = t > tile ? (two ? multiply_tiles<2, 2> : multiply_tiles<1, 2>)
                                  : (two ? multiply_tiles<2, 2, true> : multiply_tiles<1, 2, true>);
        multiply(a, stride, 32, wp + p * 32 * k, 32 * LANES, 2 * 32 * LANES, k / 32, c, 2 * BLOCK, BLOCK, false);
        for (int64_t i = 0; i < std::min<int64_t>(num_tokens - t * LANES, (1 + two) * LANES); ++i) {
          const float* row = c + i / LANES * 2 * BLOCK + i % LANES * LANES;
          outputs.store_row(load(row), load(row + BLOCK), p, t * LANES + i);
        }
      }
  };
  const int64_t panels = (outputs.num_outputs + Outputs::WIDTH - 1) / Outputs::WIDTH;
  for_pieces<AmxEngine>(tiles, panels, 2 * LANES * k * sizeof(T), work);
}

#endif

}  // namespace nanoapc
