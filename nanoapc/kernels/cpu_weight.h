// A bfloat16 weight in 12 bits an element, exactly: decoding reads each weight once a step, so bytes are its time.
//
//     bfloat16   s eeeeeeee mmmmmmm        a weight's exponents e are few: 15 of them cover all but some 0.02 %
//     packed     s mmmmmmm + 4 bits        which of the 15; 0: the next of the panel's escapes, 8 bits each
//
// (Exponents compress, mantissas do not: Zhang et al. 2025, "70% Size, 100% Accuracy", DFloat11. Their codes are
// Huffman's; codes of one size unpack in the shadow of the matrix unit.) The elements are kept as the matrix unit takes
// them as its right side, in the order in which they are read, so that memory gives them in one stream:
//
//     [panel of 32 outputs][step of 32 k]: 2 tiles of [16 pairs of k][16 outputs][2] = 8 parts of 128 elements
//     part: [codes: 32 words of 4 x 4 bits][sign and mantissa: 2 x 32 words of 2 x 8 bits]; of element
//           32 * i + lane, word `lane` of the codes has the code at bit 4 * i, word `lane` of the i / 2-th 32 the rest
//           where the element has it (bits 15 and 6 to 0), or with the word's bytes swapped if i is odd.
//
// Invariant: what is unpacked is the weight, bit by bit, whatever bits it has.

#pragma once

#include "cpu_matrix.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <tuple>
#include <vector>

#ifdef NANOAPC_AMX

#include <sys/mman.h>

namespace nanoapc {

constexpr int64_t STEP = 2 * 32 * LANES;                     // elements of a step of a panel
constexpr int64_t PARTS = 8, PART = STEP / PARTS;            // one for each call of aside; a part's elements
constexpr int64_t PART_BYTES = PART * 3 / 2, STEP_BYTES = PARTS * PART_BYTES;
constexpr int64_t ESCAPES_READ = 32;                         // escapes that are loaded at once, needed or not

// stream [panels][k / 32][STEP_BYTES], escapes [their number + ESCAPES_READ] bytes, starts [panels] into escapes,
// exponents [32, a vector]: what codes 1 to 15 stand for, shifted to where an element has it
using PackedWeight = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The 15 most frequent exponents, as a sample of the weight tells, from [1] on.
inline std::array<uint16_t, 32> frequent_exponents(const c10::BFloat16* weight, int64_t num_rows, int64_t k) {
  std::array<int64_t, 256> counts{};
  for (int64_t row = 0; row < num_rows; row += 1 + num_rows / 256)
    for (int64_t i = 0; i < k; ++i) ++counts[weight[row * k + i].x >> 7 & 255];
  std::array<uint16_t, 32> exponents{};
  for (int code = 1; code < 16; ++code) {
    auto* most = std::max_element(counts.begin(), counts.end());
    exponents[code] = uint16_t(most - counts.begin()) << 7;
    *most = -1;
  }
  return exponents;
}

// elements[PART] -> PART_BYTES; what has no code is added to the escapes
inline void pack_part(const c10::BFloat16* elements, const std::array<uint16_t, 32>& exponents, uint8_t* out,
                      std::vector<uint8_t>& escapes) {
  __m512i codes = _mm512_setzero_si512(), rest[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i element = _mm512_loadu_si512(elements + 32 * i);
    const __m512i exponent = _mm512_and_si512(element, _mm512_set1_epi16(255 << 7));
    rest[i] = _mm512_andnot_si512(_mm512_set1_epi16(255 << 7), element);
    __m512i code = _mm512_setzero_si512();
    for (int c = 1; c < 16; ++c) {
      const __mmask32 is = _mm512_cmpeq_epi16_mask(exponent, _mm512_set1_epi16(exponents[c]));
      code = _mm512_mask_mov_epi16(code, is, _mm512_set1_epi16(c));
    }
    for (__mmask32 left = _mm512_testn_epi16_mask(code, code); left; left &= left - 1)
      escapes.push_back(elements[32 * i + __builtin_ctz(left)].x >> 7 & 255);
    codes = _mm512_or_si512(codes, _mm512_sllv_epi16(code, _mm512_set1_epi16(4 * i)));
  }
  _mm512_storeu_si512(out, codes);
  for (int i = 0; i < 4; i += 2)  // the second of a pair with its bytes swapped fills what the first leaves free
    _mm512_storeu_si512(out + 64 + 32 * i, _mm512_or_si512(rest[i], _mm512_shldi_epi16(rest[i + 1], rest[i + 1], 8)));
}

// The reverse; returns where the next part's escapes are.
inline INLINED const uint8_t* unpack_part(const uint8_t* part, const uint8_t* escapes, __m512i exponents,
                                          c10::BFloat16* out) {
  const __m512i low = _mm512_set1_epi16(15), kept = _mm512_set1_epi16(int16_t(0x807f));
  const __m512i codes = _mm512_loadu_si512(part);
  const __m512i first = _mm512_loadu_si512(part + 64), second = _mm512_loadu_si512(part + 128);
  const __m512i code[4] = {_mm512_and_si512(codes, low), _mm512_and_si512(_mm512_srli_epi16(codes, 4), low),
                           _mm512_and_si512(_mm512_srli_epi16(codes, 8), low), _mm512_srli_epi16(codes, 12)};
  const __m512i rest[4] = {first, _mm512_shldi_epi16(first, first, 8), second, _mm512_shldi_epi16(second, second, 8)};
  for (int i = 0; i < 4; ++i) {
    __m512i exponent = _mm512_permutexvar_epi16(code[i], exponents);
    const __mmask32 escaped = _mm512_testn_epi16_mask(code[i], code[i]);
    if (__builtin_expect(escaped != 0, 0)) {
      const __m512i next = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(escapes)));
      exponent = _mm512_mask_expand_epi16(exponent, escaped, _mm512_slli_epi16(next, 7));
      escapes += __builtin_popcount(escaped);
    }
    _mm512_store_si512(out + 32 * i, _mm512_ternarylogic_epi32(rest[i], kept, exponent, 0xea /* (a & b) | c */));
  }
  return escapes;
}

// Bytes in pages of 2 MiB, if the system has them: who reads them all waits less for addresses to be translated. What
// does not fill a page is in small ones.
inline Tensor large_bytes(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr size_t PAGE = 2 << 20;
  const size_t num_bytes = c10::multiply_integers(sizes);
  void* memory = std::aligned_alloc(PAGE, (num_bytes + PAGE - 1) / PAGE * PAGE);
  if (!memory) throw std::bad_alloc();
  const size_t whole = num_bytes / PAGE * PAGE;
  madvise(memory, whole, MADV_HUGEPAGE);
  if (num_bytes > whole) madvise(static_cast<char*>(memory) + whole, PAGE, MADV_NOHUGEPAGE);
  return at::from_blob(memory, sizes, [](void* p) { std::free(p); }, options);
}

// weight [rows, k], both multiples of 32; gated: a panel is 16 rows of each half
inline PackedWeight pack_weight(const Tensor& weight, bool gated) {
  const int64_t num_rows = weight.size(0), k = weight.size(1), panels = num_rows / 32;
  const int64_t second = gated ? num_rows / 2 : LANES, width = gated ? LANES : 2 * LANES;
  const auto* from = weight.const_data_ptr<c10::BFloat16>();
  const auto exponents = frequent_exponents(from, num_rows, k);
  const auto bytes = weight.options().dtype(at::kByte);
  Tensor stream = large_bytes({panels, k / 32, STEP_BYTES}, bytes);
  Tensor starts = at::empty({panels}, bytes.dtype(at::kLong));
  std::vector<std::vector<uint8_t>> of_panel(panels);
  auto* out = stream.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    alignas(64) c10::BFloat16 tiles[STEP];
    for (int64_t p = begin; p < end; ++p)
      for (int64_t s = 0; s < k / 32; ++s) {
        for (int64_t h = 0; h < 2; ++h) {
          const c10::BFloat16* rows[LANES];
          for (int64_t r = 0; r < LANES; ++r) rows[r] = from + (p * width + h * second + r) * k + s * 32;
          AmxEngine::pack(rows, 32, tiles + h * STEP / 2);
        }
        for (int64_t i = 0; i < PARTS; ++i)
          pack_part(tiles + i * PART, exponents, out + (p * k / 32 + s) * STEP_BYTES + i * PART_BYTES, of_panel[p]);
      }
  });
  int64_t total = 0;
  for (int64_t p = 0; p < panels; ++p) {
    starts.mutable_data_ptr<int64_t>()[p] = total;
    total += of_panel[p].size();
  }
  Tensor escapes = at::empty({total + ESCAPES_READ}, bytes);
  auto* to = escapes.mutable_data_ptr<uint8_t>();
  for (const auto& list : of_panel) to = std::copy(list.begin(), list.end(), to);
  Tensor table = at::empty({32}, bytes.dtype(at::kShort));
  std::memcpy(table.mutable_data_ptr<int16_t>(), exponents.data(), sizeof exponents);
  return {stream, escapes, starts, table};
}

// Unpacks the parts of a panel's steps, one a call.
struct Unpacker {
  Unpacker(const PackedWeight& weight, int64_t panel) {
    const auto& [stream, all_escapes, starts, table] = weight;
    next = stream.const_data_ptr<uint8_t>() + panel * stream.stride(0);
    escapes = all_escapes.const_data_ptr<uint8_t>() + starts.const_data_ptr<int64_t>()[panel];
    exponents = _mm512_loadu_si512(table.const_data_ptr<int16_t>());
  }

  INLINED void part(c10::BFloat16* out) {
    for (int64_t i = 0; i < PART_BYTES; i += 64) __builtin_prefetch(next + AHEAD + i);
    escapes = unpack_part(next, escapes, exponents, out);
    next += PART_BYTES;
  }

  static constexpr int64_t AHEAD = 4 * STEP_BYTES;
  const uint8_t *next, *escapes;
  __m512i exponents;
};

}  // namespace nanoapc

#endif
