// Sampling: the greatest of a row, a draw, and what top_k and top_p leave of it.
//
// Invariant: a row's result depends on the row alone, and is the reference's bit for bit: masses of probabilities are
// its integers (`fixed_weights`), whose sums are the same in every order; ties go to the lowest id.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpu_vector.h"

namespace nanoapc {

// ---- the greatest ----

// The greatest of n values, lane by lane; is_nan: of these and what came before.
template <typename T> inline f32x16 greatest_lanes(const T* x, int64_t n, i32x16& is_nan) {
  f32x16 greatest = broadcast(-INFINITY);
  for (int64_t i = 0; i < n; i += LANES) {
    const i32x16 inside = lane_numbers() < int32_t(std::min<int64_t>(n - i, LANES));
    const f32x16 v = inside ? load_some(x + i, n - i) : broadcast(-INFINITY);
    greatest = max(v, greatest), is_nan |= v != v;
  }
  return greatest;
}
inline float unless_nan(float greatest, i32x16 is_nan) {
  for (int i = 0; i < LANES; ++i)
    if (is_nan[i]) return NAN;
  return greatest;
}

// The greatest of each row (NaN if one is NaN), and the first id that has it.
std::tuple<Tensor, Tensor> argmax(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "argmax: rows must be contiguous");
  const int64_t num_rows = logits.size(0), num_ids = logits.size(1);
  Tensor peaks = at::empty({num_rows}, logits.options().dtype(at::kFloat));
  Tensor ids = at::empty({num_rows}, logits.options().dtype(at::kLong));
  float* peak = peaks.mutable_data_ptr<float>();
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  for_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* lp = logits.const_data_ptr<T>();
    for_rows(num_rows, num_ids, [&](int64_t row) {
      const T* logit = lp + row * logits.stride(0);
      float best = -INFINITY;
      int64_t piece = 0;  // the first that has the best
      i32x16 is_nan{};
      for (int64_t first = 0; first < num_ids; first += BLOCK) {
        const float highest = max_lanes(greatest_lanes(logit + first, std::min<int64_t>(BLOCK, num_ids - first), is_nan));
        if (highest > best) best = highest, piece = first;
      }
      while (best > -INFINITY && static_cast<float>(logit[piece]) != best) ++piece;
      id[row] = piece, peak[row] = unless_nan(best, is_nan);
    });
  });
  return {peaks, ids};
}

// ---- a draw ----

template <typename U> inline U mix(U x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// At least the noise of these hashes, by less than 0.1 where it is large. With v = 1 - u and t = -log(u):
// t = v + v^2/2 + v^3/3 + ... >= y, the first three terms, so -log(t) <= -log(y); the logarithm is taken cheaply.
inline f32x16 noise_bound(u32x16 hash) {
  const f32x16 v = (0x1000000 - __builtin_convertvector((i32x16)(hash >> 8), f32x16) - 0.5f) * 0x1p-24f;
  const f32x16 y = v * (v * (v * 0.33333333f + 0.5f) + 1.0f);
  const i32x16 bits = (i32x16)y;
  const f32x16 exponent = __builtin_convertvector((bits >> 23) - 127, f32x16);
  const f32x16 m = (f32x16)((bits & 0x7fffff) | 0x3f800000) - 1.0f;
  const f32x16 log2 = exponent + m * (1.4247f - m * 0.4247f);  // within 0.01
  return log2 * -0.69314718f + 0.02f;
}

// argmax(logits + noise) per row. The noise costs two logarithms in double precision, so it is taken only for
// ids whose bound reaches the best value so far: a few of each row.
Tensor gumbel_argmax(const Tensor& logits, const Tensor& seeds, const Tensor& positions) {
  TORCH_CHECK(logits.is_contiguous() && logits.scalar_type() == at::kFloat, "gumbel_argmax: float32 logits are needed");
  const int64_t num_rows = logits.size(0), num_ids = logits.size(1);
  Tensor ids = at::empty({num_rows}, seeds.options());
  const float* lp = logits.const_data_ptr<float>();
  const int64_t *seed = seeds.const_data_ptr<int64_t>(), *position = positions.const_data_ptr<int64_t>();
  int64_t* out = ids.mutable_data_ptr<int64_t>();
  for_rows(num_rows, num_ids, [&](int64_t row) {
    const float* logit = lp + row * num_ids;
    const uint32_t k0 = mix(mix(uint32_t(position[row])) ^ uint32_t(seed[row]));
    const uint32_t k1 = mix(k0 ^ uint32_t(uint64_t(seed[row]) >> 32) ^ 0x9e3779b9u);
    const u32x16 lane = (u32x16)lane_numbers();
    float best = -INFINITY;
    out[row] = 0;
    for (int64_t first = 0; first < num_ids; first += 8 * LANES) {
      const int64_t end = std::min<int64_t>(first + 8 * LANES, num_ids);
      f32x16 bound = broadcast(-INFINITY);
      for (int64_t i = first; i < end; i += LANES) {
        const u32x16 hash = mix(mix(lane + uint32_t(i) + k0) ^ k1);
        bound = max(load_some(logit + i, end - i) + noise_bound(hash), bound);
      }
      if (max_lanes(bound) <= best) continue;
      for (int64_t i = first; i < end; ++i) {
        const uint32_t hash = mix(mix(uint32_t(i) + k0) ^ k1);
        const double u = ((hash >> 8) + 0.5) * 0x1p-24;
        const float value = logit[i] + static_cast<float>(-std::log(-std::log(u)));
        if (value > best) best = value, out[row] = i;
      }
    }
  });
  return ids;
}

// ---- top_k and top_p ----
//
// Nothing is sorted but what lies near the cut: a pass over the row counts (or weighs) its values in bins by their
// distance from the greatest, and only the bin in which the goal is reached is looked at value by value.
//
//     greatest |  bin 0  |  bin 1  |  bin 2  |  bin 3  | ...           goal: so many values, or so much mass
//              |  kept   |  kept   |  cut    |  dropped

constexpr int NUM_BINS = 1024;
constexpr float BINS_PER_UNIT = 16.0f;  // what is 64 or more below the greatest is in the last one

// What stays of a row: the values above `value`, and the first `num_tied` of those that equal it.
struct Cut {
  float value;
  int64_t num_tied;
};

inline int bin_of(float x, float greatest) {
  const float distance = (greatest - x) * BINS_PER_UNIT;
  return distance < NUM_BINS - 1 ? static_cast<int>(distance) : NUM_BINS - 1;  // NaN: the last
}

// weights[i] = exp(x[i] - greatest) in units of 2^-40: `fixed_weights` of the reference. Every product and sum is
// rounded by itself, so the compiler must not make one operation of two.
#ifdef __clang__
#define NANOAPC_UNFUSED
#else
#define NANOAPC_UNFUSED __attribute__((noinline, optimize("fp-contract=off")))
#endif
NANOAPC_UNFUSED inline void weigh(const float* x, int64_t n, float greatest, int64_t* weights) {
#ifdef __clang__
#pragma clang fp contract(off)
#endif
  for (int64_t i = 0; i < n; ++i) {
    float y = (x[i] - greatest) * 1.4426950408889634f;
    y = y > -63.0f ? y : -63.0f;
    const float whole = std::floor(y), rest = y - whole;
    float power = rest * 0.0018775767f;
    power = (power + 0.0089893397f) * rest;
    power = (power + 0.055826318f) * rest;
    power = (power + 0.24015361f) * rest;
    power = (power + 0.69315308f) * rest;
    const int32_t bits = (static_cast<int32_t>(whole) + 127 + 40) << 23;  // of 2^(whole + 40)
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    weights[i] = static_cast<int64_t>((power + 0.99999994f) * scale);
  }
}

// The values of a row in one bin.
inline std::vector<float> values_in(const float* x, int64_t n, float greatest, int bin) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i)
    if (bin_of(x[i], greatest) == bin) values.push_back(x[i]);
  return values;
}

// The bin in which the goal is reached; the goal becomes what is left of it there.
inline int find_bin(const int64_t* bins, int64_t& goal) {
  int bin = 0;
  for (; bins[bin] < goal; ++bin) goal -= bins[bin];
  return bin;
}

// Keeps k of the row's n values.
inline Cut cut_by_count(const float* x, int64_t n, float greatest, int64_t k) {
  int64_t counts[NUM_BINS] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[bin_of(x[i], greatest)];
  std::vector<float> values = values_in(x, n, greatest, find_bin(counts, k));
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
  const float value = values[k - 1];
  return {value, k - std::count_if(values.begin(), values.end(), [&](float v) { return v > value; })};
}

// Keeps values, which become sorted, until their mass reaches goal(mass of all of them).
template <typename Goal> inline Cut cut_sorted(std::vector<float>& values, float greatest, const Goal& goal) {
  std::sort(values.begin(), values.end(), std::greater<>());
  std::vector<int64_t> weights(values.size());
  weigh(values.data(), values.size(), greatest, weights.data());
  const int64_t enough = goal(std::accumulate(weights.begin(), weights.end(), int64_t(0)));
  size_t end = 0, tied = 0;  // values before `end` are kept, those from `tied` on equal the last one
  for (int64_t mass = 0; mass < enough && end < values.size(); mass += weights[end++])
    if (values[end] != values[tied]) tied = end;
  return {values[tied], int64_t(end - tied)};
}

inline int64_t share_of(int64_t mass, double share) {
  return std::min(static_cast<int64_t>(std::ceil(share * static_cast<double>(mass))), mass);
}

// Keeps the likeliest of the row's n values, which together have `share` of the mass.
inline Cut cut_by_mass(const float* x, int64_t n, float greatest, double share) {
  int64_t masses[NUM_BINS] = {}, weights[BLOCK];
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int64_t count = std::min<int64_t>(BLOCK, n - first);
    weigh(x + first, count, greatest, weights);
    for (int64_t i = 0; i < count; ++i) masses[bin_of(x[first + i], greatest)] += weights[i];
  }
  int64_t goal = share_of(std::accumulate(masses, masses + NUM_BINS, int64_t(0)), share);
  std::vector<float> values = values_in(x, n, greatest, find_bin(masses, goal));
  return cut_sorted(values, greatest, [&](int64_t) { return goal; });
}

// The same of those that a cut has left.
inline Cut cut_by_mass(const float* x, int64_t n, float greatest, double share, const Cut& cut) {
  std::vector<float> values(cut.num_tied, cut.value);
  for (int64_t i = 0; i < n; ++i)
    if (x[i] > cut.value) values.push_back(x[i]);
  return cut_sorted(values, greatest, [&](int64_t mass) { return share_of(mass, share); });
}

// x [m, V] -> the same with -inf outside the top_k [m] (V is off) and top_p [m] (1 is off) sets.
Tensor keep_top(const Tensor& x, const Tensor& top_k, const Tensor& top_p) {
  TORCH_CHECK(x.is_contiguous() && x.dim() == 2 && x.scalar_type() == at::kFloat && top_k.is_contiguous() &&
                  top_p.is_contiguous() && top_k.numel() == x.size(0) && top_p.numel() == x.size(0),
              "keep_top: float32 rows are needed, and a top_k and a top_p for each");
  const int64_t n = x.size(1);
  Tensor kept = at::empty_like(x);
  const float* xp = x.const_data_ptr<float>();
  float* out = kept.mutable_data_ptr<float>();
  const int64_t* k = top_k.const_data_ptr<int64_t>();
  const double* p = top_p.const_data_ptr<double>();
  for_rows(x.size(0), n, [&](int64_t row) {
    const float* from = xp + row * n;
    float* to = out + row * n;
    i32x16 is_nan{};
    const f32x16 lanes = greatest_lanes(from, n, is_nan);
    const float greatest = unless_nan(max_lanes(lanes), is_nan);
    const bool counts = k[row] < n, weighs = p[row] < 1;
    if (!(counts || weighs) || !std::isfinite(greatest)) {
      std::copy(from, from + n, to);
      return;
    }
    Cut cut = counts ? cut_by_count(from, n, greatest, k[row]) : cut_by_mass(from, n, greatest, p[row]);
    if (counts && weighs) cut = cut_by_mass(from, n, greatest, p[row], cut);
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] > cut.value ? from[i] : -INFINITY;
    for (int64_t i = 0; cut.num_tied > 0; ++i)
      if (from[i] == cut.value) to[i] = from[i], --cut.num_tied;
  });
  return kept;
}

}  // namespace nanoapc
