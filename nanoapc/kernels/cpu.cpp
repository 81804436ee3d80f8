// The CPU kernels as PyTorch operators (torch.ops.nanoapc_cpu.*), see kernels/__init__.py for what each has to do.
//
// Invariant: a row's result does not depend on the other rows of the call, nor on the number of threads.
// `amx` says whether attention may use the matrix unit for bfloat16 (it is ignored where there is none).

#include "cpu_attention.h"
#include "cpu_linear.h"
#include "cpu_sampling.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

namespace nanoapc {

// ---- linear ----

// x [T, in], weight [rows padded to 32, in] -> [T, num_outputs]
// gated: rows of gate, then of up -> silu(gate) * up; num_outputs of each, a multiple of 16
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t num_outputs,
              bool gated) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == weight.scalar_type() && weight.is_contiguous() &&
                  weight.size(0) >= (1 + gated) * num_outputs && weight.size(0) % 32 == 0 &&
                  weight.size(1) == x.size(1),
              "linear: x ", x.sizes(), " does not fit the weight ", weight.sizes());
  Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T* b = bias ? bias->const_data_ptr<T>() : nullptr;
    T* o = out.mutable_data_ptr<T>();
    gated ? linear_in_place(x, weight, Gated<T>{b, o, num_outputs})
          : linear_in_place(x, weight, Plain<T>{b, o, num_outputs});
  });
  return out;
}

#ifdef NANOAPC_AMX

// weight [rows, in], both multiples of 32 -> see PackedWeight
std::tuple<Tensor, Tensor, Tensor, Tensor> pack_linear_weight(const Tensor& weight, bool gated) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.is_contiguous() && weight.size(0) % 32 == 0 &&
                  weight.size(1) % 32 == 0, "pack_linear_weight: bad weight ", weight.sizes());
  return pack_weight(weight, gated);
}

// The same as linear for a packed weight; x [T, in padded to 32]
Tensor packed_linear(const Tensor& x, const Tensor& stream, const Tensor& escapes, const Tensor& starts,
                     const Tensor& exponents, const std::optional<Tensor>& bias, int64_t num_outputs, bool gated) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == at::kBFloat16 &&
                  x.size(1) == stream.size(1) * 32 && (1 + gated) * num_outputs <= stream.size(0) * 32 &&
                  amx_available(),
              "packed_linear: x ", x.sizes(), " does not fit ", stream.sizes());
  Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  using T = c10::BFloat16;
  const PackedWeight weight{stream, escapes, starts, exponents};
  const T* b = bias ? bias->const_data_ptr<T>() : nullptr;
  T* o = out.mutable_data_ptr<T>();
  gated ? linear_packed(x, weight, Gated<T>{b, o, num_outputs}) : linear_packed(x, weight, Plain<T>{b, o, num_outputs});
  return out;
}

#endif

// ---- attention ----

// [NB, 2, Hkv, B, D] with all of a head's K (or V) of a block in one piece, head after head
inline bool has_dense_heads(const Tensor& kv_cache) {
  const int64_t block_size = kv_cache.size(3), d = kv_cache.size(4);
  return kv_cache.stride(4) == 1 && kv_cache.stride(3) == d && kv_cache.stride(2) == block_size * d;
}

template <typename Values>
void attend(const Tensor& q, const Tensor& kv_cache, const Tensor& tiles, const Tensor& positions,
            const Tensor& block_tables, at::IntArrayRef level_starts, double scale, Tensor& out) {
  using T = typename Values::T;
  const int64_t num_rows = q.size(0), num_heads = q.size(1), d = q.size(2), num_kv_heads = kv_cache.size(2);
  const int64_t num_levels = static_cast<int64_t>(level_starts.size()) - 1;
  const int32_t* tile = tiles.const_data_ptr<int32_t>();
  std::vector<int32_t> last_level;
  Tensor state;
  if (num_levels > 1) {
    last_level.resize(num_rows);
    state = at::empty({num_rows * num_heads * (d + 2)}, q.options().dtype(at::kFloat));
    for (const int32_t* t = tile; t < tile + level_starts.back() * TILE_SIZE; t += TILE_SIZE)
      std::fill_n(last_level.begin() + t[ROW_START], t[NUM_ROWS], t[LEVEL]);
  }
  const Attention<Values> attention{
      q.const_data_ptr<T>(), out.mutable_data_ptr<T>(), kv_cache.const_data_ptr<T>(), kv_cache.stride(0),
      kv_cache.stride(1), num_heads, num_kv_heads, kv_cache.size(3), d, tile, positions.const_data_ptr<int64_t>(),
      block_tables.const_data_ptr<int32_t>(), block_tables.size(1), static_cast<float>(scale) * LOG2_E,
      num_levels > 1 ? state.mutable_data_ptr<float>() : nullptr, last_level.data()};
  std::vector<Task> tasks;
  const int32_t group = static_cast<int32_t>(num_heads / num_kv_heads);
  for (int64_t level = 0; level < num_levels; ++level) {
    int64_t total = 0;
    for (int64_t i = level_starts[level]; i < level_starts[level + 1]; ++i)
      total += tile[i * TILE_SIZE + NUM_ROWS] * num_heads;
    // A few tasks for each thread, also where one prefix is all there is.
    const int64_t share = total / (2 * at::get_num_threads()) / LANES * LANES;
    const int32_t limit = static_cast<int32_t>(std::clamp<int64_t>(share, 2 * LANES, MAX_COLUMNS));
    tasks.clear();
    for (int64_t i = level_starts[level]; i < level_starts[level + 1]; ++i) {
      const int32_t columns = tile[i * TILE_SIZE + NUM_ROWS] * group;
      for (int32_t head = 0; head < num_kv_heads; ++head)
        for (int32_t first = 0; first < columns; first += limit)
          tasks.push_back({int32_t(i), head, first, std::min<int32_t>(limit, columns - first)});
    }
    for_each(tasks.size(), 1, [&](auto&& take) {
      typename Values::Engine::Session session;
      take([&](int64_t i, int64_t next) { attention.run(tasks[i], next < 0 ? nullptr : &tasks[next]); });
    });
  }
}

Tensor attention(const Tensor& q, const Tensor& kv_cache, const Tensor& tiles, const Tensor& positions,
                 const Tensor& block_tables, at::IntArrayRef level_starts, double scale, bool amx) {
  TORCH_CHECK(q.is_contiguous() && tiles.is_contiguous() && block_tables.is_contiguous() &&
                  has_dense_heads(kv_cache) && q.scalar_type() == kv_cache.scalar_type(),
              "attention: layouts or dtypes do not fit");
  Tensor out = at::empty_like(q);
  for_dtype(q, [&](auto zero) {
    using T = decltype(zero);
#ifdef NANOAPC_AMX
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (amx && amx_available() && q.size(2) % LANES == 0)
        return attend<AmxValues>(q, kv_cache, tiles, positions, block_tables, level_starts, scale, out);
#endif
    attend<VectorValues<T>>(q, kv_cache, tiles, positions, block_tables, level_starts, scale, out);
  });
  return out;
}

// ---- element-wise steps ----

// 1 / rms of n values, whose squares have been summed lane by lane
inline float inverse_rms(f32x16 squares, int64_t n, double eps) {
  return 1.0f / std::sqrt(sum_lanes(squares) / n + static_cast<float>(eps));
}

template <typename T> inline f32x16 normalised(f32x16 x, float factor, f32x16 weight) {
  return round_to<T>(round_to<T>(x * factor) * weight);
}

// (norm(x + residual), x + residual); without a residual (norm(x), x itself)
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight,
                                    double eps) {
  TORCH_CHECK(x.is_contiguous() && (!residual || residual->is_contiguous()), "rms_norm: inputs must be contiguous");
  Tensor out = at::empty_like(x), total = residual ? at::empty_like(x) : x;
  const int64_t n = x.size(-1), num_rows = n ? x.numel() / n : 0;
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T *xp = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    const T *rp = residual ? residual->const_data_ptr<T>() : nullptr, *tp = total.const_data_ptr<T>();
    T *op = out.mutable_data_ptr<T>(), *sum = residual ? total.mutable_data_ptr<T>() : nullptr;
    for_rows(num_rows, n, [&](int64_t row) {
      const int64_t first = row * n;
      f32x16 squares{};
      for (int64_t i = 0; i < n; i += LANES) {
        f32x16 v = load_some(xp + first + i, n - i);
        if (rp) {
          v = round_to<T>(v + load_some(rp + first + i, n - i));
          store_some(sum + first + i, v, n - i);
        }
        squares += v * v;
      }
      const float factor = inverse_rms(squares, n, eps);
      for (int64_t i = 0; i < n; i += LANES)
        store_some(op + first + i, normalised<T>(load_some(tp + first + i, n - i), factor, load_some(w + i, n - i)),
                   n - i);
    });
  });
  return {out, total};
}

// One head's d elements: normalised (if there is a weight), then rotated by cos and sin, d / 2 each.
template <typename T>
inline void rotate(const T* x, const T* weight, double eps, const float* cos, const float* sin, int64_t d, T* out) {
  f32x16 squares{};
  for (int64_t i = 0; weight && i < d; i += LANES) {
    const f32x16 v = load_some(x + i, d - i);
    squares += v * v;
  }
  const float factor = weight ? inverse_rms(squares, d, eps) : 1.0f;
  auto element = [&](int64_t i, int64_t n) {
    const f32x16 v = load_some(x + i, n);
    return weight ? normalised<T>(v, factor, load_some(weight + i, n)) : v;
  };
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t n = half - i;
    const f32x16 a = element(i, n), b = element(half + i, n), c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, a * c - b * s, n);
    store_some(out + half + i, b * c + a * s, n);
  }
}

Tensor rope_and_store(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin,
                      const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
                      const Tensor& kv_cache, const Tensor& slots) {
  const int64_t num_rows = qkv.size(0), hkv = kv_cache.size(2), block_size = kv_cache.size(3), d = kv_cache.size(4);
  const int64_t num_heads = qkv.size(1) / d - 2 * hkv;
  TORCH_CHECK(qkv.is_contiguous() && cos_sin.is_contiguous() && has_dense_heads(kv_cache) &&
                  qkv.scalar_type() == kv_cache.scalar_type(),
              "rope_and_store: layouts or dtypes do not fit");
  Tensor q = at::empty({num_rows, num_heads, d}, qkv.options());
  const int64_t *position = positions.const_data_ptr<int64_t>(), *slot = slots.const_data_ptr<int64_t>();
  for_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const T* in = qkv.const_data_ptr<T>();
    const T* q_weight = q_norm ? q_norm->const_data_ptr<T>() : nullptr;
    const T* k_weight = k_norm ? k_norm->const_data_ptr<T>() : nullptr;
    T *qp = q.mutable_data_ptr<T>(), *cache = kv_cache.mutable_data_ptr<T>();
    for_rows(num_rows, qkv.size(1), [&](int64_t row) {
      const float* cos = cos_sin.const_data_ptr<float>() + position[row] * cos_sin.stride(0);
      const T* from = in + row * qkv.size(1);
      for (int64_t head = 0; head < num_heads; ++head, from += d)
        rotate(from, q_weight, eps, cos, cos + d / 2, d, qp + (row * num_heads + head) * d);
      if (slot[row] < 0) return;
      T* to = cache + slot[row] / block_size * kv_cache.stride(0) + slot[row] % block_size * d;
      for (int64_t head = 0; head < hkv; ++head, from += d, to += block_size * d) {
        rotate(from, k_weight, eps, cos, cos + d / 2, d, to);
        std::memcpy((void*)(to + kv_cache.stride(1)), from + hkv * d, d * sizeof(T));
      }
    });
  });
  return q;
}

// copies: source, destination, num_tokens, source, ...
void copy_blocks(const Tensor& kv_memory, at::IntArrayRef copies) {
  TORCH_CHECK(kv_memory.is_contiguous() && kv_memory.dim() == 6, "copy_blocks: the whole KV memory is needed");
  const int64_t block_bytes = kv_memory.stride(0) * kv_memory.element_size();
  const int64_t token_bytes = kv_memory.size(5) * kv_memory.element_size();
  const int64_t extent = kv_memory.size(4) * token_bytes;  // one layer, K or V, one head
  char* memory = static_cast<char*>(kv_memory.data_ptr());
  for (size_t i = 0; i + 2 < copies.size(); i += 3) {
    TORCH_CHECK(copies[i + 2] >= 0 && copies[i + 2] <= kv_memory.size(4), "copy_blocks: too many tokens");
    const char* source = memory + copies[i] * block_bytes;
    char* destination = memory + copies[i + 1] * block_bytes;
    if (source == destination) continue;
    for (int64_t at = 0; at < block_bytes; at += extent)
      std::memcpy(destination + at, source + at, copies[i + 2] * token_bytes);
  }
}

TORCH_LIBRARY(nanoapc_cpu, m) {
  m.def("has_amx() -> bool", &amx_available);
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, int num_outputs, bool gated) -> Tensor", &linear);
#ifdef NANOAPC_AMX
  m.def("pack_linear_weight(Tensor weight, bool gated) -> (Tensor, Tensor, Tensor, Tensor)", &pack_linear_weight);
  m.def("packed_linear(Tensor x, Tensor stream, Tensor escapes, Tensor starts, Tensor exponents, Tensor? bias, "
        "int num_outputs, bool gated) -> Tensor", &packed_linear);
#endif
  m.def("attention(Tensor q, Tensor kv_cache, Tensor tiles, Tensor positions, Tensor block_tables, int[] level_starts, "
        "float scale, bool amx) -> Tensor", &attention);
  m.def("rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor)", &rms_norm);
  m.def("rope_and_store(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
        "Tensor kv_cache, Tensor slots) -> Tensor", &rope_and_store);
  m.def("copy_blocks(Tensor kv_memory, int[] copies) -> ()", &copy_blocks);
  m.def("argmax(Tensor logits) -> (Tensor, Tensor)", &argmax);
  m.def("gumbel_argmax(Tensor logits, Tensor seeds, Tensor positions) -> Tensor", &gumbel_argmax);
  m.def("keep_top(Tensor x, Tensor top_k, Tensor top_p) -> Tensor", &keep_top);
}

}  // namespace nanoapc
