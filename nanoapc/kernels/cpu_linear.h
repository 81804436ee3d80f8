// Linear layers, y = x W^T + b.
//
// A weight is read in panels of 32 rows, two groups of 16. What becomes of the products of a token with a panel,
// (low, high) = its 16 + 16 outputs, is up to `Outputs`: they are stored (Plain), or low gates high (Gated).
//
// With AMX a weight is packed once (cpu_weight.h), and the tokens are the matrix unit's left side, nearly as they are.
// Without AMX it is read where it lies.
//
// Invariant: an output is one chain of additions in ascending order (see cpu_matrix.h), whatever else is computed and
// whichever way the weight is read.

#pragma once

#include "cpu_weight.h"

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
template <template <typename> typename Outputs, typename T>
void linear_in_place(const Tensor& x, const Tensor& weight, const Outputs<T>& outputs) {
  using Engine = VectorEngine<T>;
  using Packed = typename Engine::Packed;
  constexpr int64_t AT_ONCE = Engine::TILES_AT_ONCE;
  const int64_t num_tokens = x.size(0), k = x.size(1), packed = Engine::packed_size(k);
  const int64_t panels = (outputs.num_outputs + Outputs<T>::WIDTH - 1) / Outputs<T>::WIDTH;
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
      float* c = scratch<float>(RESULT, AT_ONCE * 2 * BLOCK);  // [tile][2 groups][16 outputs][16 tokens]
      alignas(64) float rows[2][BLOCK];                        // [16 tokens][16 outputs]
      for (int64_t first = tile; first < end_tile; first += AT_ONCE)
        for (int64_t p = panel; p < end_panel; ++p) {
          const T* groups[2] = {wp + p * Outputs<T>::WIDTH * k};
          groups[1] = groups[0] + outputs.second_group() * k;
          const int64_t num = std::min(AT_ONCE, end_tile - first);
          Engine::multiply(groups, 2, k, k, columns + first * packed, num, c, 2 * BLOCK);
          for (int64_t t = 0; t < num; ++t) {
            const int64_t token = (first + t) * LANES, n = std::min<int64_t>(LANES, count - token);
            for (int h = 0; h < 2; ++h) transpose(c + (2 * t + h) * BLOCK, rows[h], LANES, n);
            for (int64_t i = 0; i < n; ++i)
              outputs.store_row(load(rows[0] + i * LANES), load(rows[1] + i * LANES), p, begin + token + i);
          }
        }
    };
    for_pieces<Engine>(tiles, panels, 2 * LANES * k * sizeof(T), work);
  }
}

#ifdef NANOAPC_AMX

// The tokens x [T, k] as tiles of 16. Up to 32 are copied, [tile][k / 32][16][32], which loads fastest, as each panel
// reads them all. More are read where they lie, but for a last tile that is not full; what it lacks is read, not used.
struct TokenTiles {
  using T = c10::BFloat16;
  const T *x, *copied;
  int64_t num_tokens, k, stride, first_copied, row, step;  // elements from row to row of a tile, and every 32 k

  explicit TokenTiles(const Tensor& tokens)
      : x(tokens.const_data_ptr<T>()), num_tokens(tokens.size(0)), k(tokens.size(1)) {
    stride = num_tokens > 1 ? tokens.stride(0) : k;
    first_copied = few() ? 0 : num_tokens / LANES * LANES;
    row = few() ? 32 : stride, step = few() ? 32 * LANES : 32;
    T* copy = scratch<T>(COLUMNS, few() ? 2 * LANES * k : LANES * std::max(k, stride));
    copied = copy;
    for (int64_t i = first_copied; i < num_tokens; ++i) {
      T* to = copy + (i - first_copied) / LANES * LANES * k + i % LANES * row;
      for (int64_t s = 0; s < k / 32; ++s) std::memcpy((void*)(to + s * step), x + i * stride + s * 32, 32 * sizeof(T));
    }
  }
  bool few() const { return num_tokens <= 2 * LANES; }
  int64_t num_tiles() const { return (num_tokens + LANES - 1) / LANES; }
  const T* operator[](int64_t t) const {
    return t * LANES < first_copied ? x + t * LANES * stride : copied + (t * LANES - first_copied) * k;
  }
};

// Tiles t and (two) t + 1 times one panel: c [2 tiles][2 groups][16 tokens][16 outputs]; b, aside: see multiply_tiles.
template <typename B, typename Aside>
void multiply_panel(const TokenTiles& tokens, int64_t t, bool two, B b, float* c, Aside aside) {
  const c10::BFloat16* a[2] = {tokens[t], tokens[t + two]};
  const int64_t steps = tokens.k / 32;
  if (two) multiply_tiles<2, 2>(a, tokens.row, tokens.step, b, STEP / 2, steps, c, 2 * BLOCK, BLOCK, false, aside);
  else multiply_tiles<1, 2>(a, tokens.row, tokens.step, b, STEP / 2, steps, c, 2 * BLOCK, BLOCK, false, aside);
}

// x [T, k], k a multiple of 32. While the first 32 tokens are multiplied, a panel's next step is unpacked and the
// outputs of the panel before are stored. If there are more tokens, the panels stay unpacked for the rest of the chunk.
template <typename Outputs>
void linear_packed(const Tensor& x, const PackedWeight& weight, const Outputs& outputs) {
  constexpr int64_t PAIR = 2 * LANES;  // tokens that are multiplied at once
  const TokenTiles tokens(x);
  const int64_t steps = tokens.k / 32, rows_a_step = (PAIR + steps - 1) / steps;
  const int64_t mask = tokens.few() ? 1 : -1;  // step s of a panel is unpacked to place s & mask
  auto work = [&](int64_t tile, int64_t end_tile, int64_t panel, int64_t end_panel) {
    const int64_t panel_size = tokens.few() ? 0 : steps * STEP;
    auto* unpacked = scratch<c10::BFloat16>(CONVERTED, std::max((end_panel - panel) * panel_size, 2 * STEP));
    float* results = scratch<float>(RESULT, 2 * 4 * BLOCK);
    auto result = [=](int64_t p) { return results + p % 2 * 4 * BLOCK; };
    auto unpacked_panel = [=](int64_t p) { return unpacked + (p - panel) * panel_size; };
    auto multiply = [&](int64_t t, int64_t p, auto aside) {
      auto* place = unpacked_panel(p);
      auto b = [=](int64_t s) { return place + (s & mask) * STEP; };
      multiply_panel(tokens, t, t + 1 < end_tile, b, result(p), aside);
    };
    auto store_rows = [&](int64_t t, int64_t p, int64_t begin, int64_t end) {
      const int64_t first = t * LANES, num_rows = std::min(end_tile * LANES, tokens.num_tokens) - first;
      end = std::min({end, PAIR, num_rows});
      for (int64_t i = begin; i < end; ++i) {
        const float* c = result(p) + i / LANES * 2 * BLOCK + i % LANES * LANES;
        outputs.store_row(load(c), load(c + BLOCK), p, first + i);
      }
    };
    for (int64_t p = panel; p < end_panel; ++p) {
      auto* place = unpacked_panel(p);
      Unpacker unpacker(weight, p);
      for (int64_t part = 0; part < PARTS; ++part) unpacker.part(place + part * PART);
      multiply(tile, p, [=, &store_rows](int64_t s, int part) mutable INLINED {
        if (s + 1 < steps) unpacker.part(place + ((s + 1) & mask) * STEP + part * PART);
        if (part == PARTS - 1 && p > panel) store_rows(tile, p - 1, s * rows_a_step, (s + 1) * rows_a_step);
      });
    }
    store_rows(tile, end_panel - 1, 0, PAIR);
    for (int64_t t = tile + 2; t < end_tile; t += 2)
      for (int64_t p = panel; p < end_panel; ++p) {
        multiply(t, p, FetchAhead{unpacked_panel(p), STEP});
        store_rows(t, p, 0, PAIR);
      }
  };
  const int64_t panels = (outputs.num_outputs + Outputs::WIDTH - 1) / Outputs::WIDTH;
  for_pieces<AmxEngine>(tokens.num_tiles(), panels, 2 * LANES * tokens.k * sizeof(c10::BFloat16), work);
}

#endif

}  // namespace nanoapc
