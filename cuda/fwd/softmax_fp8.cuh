// Online softmax of the FP8 forward: packed f16 scores in, e4m3 bytes in wgmma A-operand order out.
//
// A lane holds rows g and g + 8 of its warp's 16 rows (g = lane / 4) and, with t = lane % 4, of
// every 16-key group G
//   acc_s[4G + 0] keys 16G + 2t, +1 of row g        acc_s[4G + 1] the same of row g + 8
//   acc_s[4G + 2] keys 16G + 8 + 2t, +1 of row g    acc_s[4G + 3] the same of row g + 8
// frag_p[2G + r] packs the four bytes of row g + 8r; v_image orders its keys to match
// (common/layout.h).
//
// Numerics. y = score * q_descale * k_descale is the logit in log2 units. Every row has an integer
// base, which no y passes by more than kSlack, and
//   P = e4m3(2^(y - base + 8)).
// An integer base makes each rescale an exact power of two and P (unless subnormal) independent of
// the kv tiling; the factor 2^8 uses e4m3's range and cancels, for the row sum is taken from the
// same bytes (a column of ones in V).
#pragma once

#include "../ptx/convert.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Config>
class Fp8Softmax {
 public:
  static constexpr int kScores = 32;  // registers: 64 rows x 128 keys, two f16 each, 128 lanes
  static constexpr int kProbs = 16;   // registers of four e4m3
  static constexpr float kOffset = kProbabilityOffset;
  static constexpr float kSlack = 0.75f;  // 2^(kOffset + kSlack) < 448, the largest e4m3 number
  // Fresh bases have headroom up to here. Beyond, P of the keys about y = 0 comes near e4m3's
  // subnormal numbers, which e4m3_codes cuts to 0, and thousands of them may weigh as much as the
  // key that leads them.
  static constexpr float kRoomyBase = 12.0f;

  // q_descale of rows g and g + 8.
  __device__ __forceinline__ void start_tile(float q_descale_0, float q_descale_1) {
    q_descale_[0] = q_descale_0;
    q_descale_[1] = q_descale_1;
    base_[0] = base_[1] = -INFINITY;
    // A row that has seen no key has no base; with any finite one its scores of -inf give 0.
    set_offset(0, 0.0f);
    set_offset(1, 0.0f);
    subtract_first_ = false;
  }

  // Key limits are relative to the block: row g sees keys below limit_0, row g + 8 keys below
  // limit_1.
  __device__ __forceinline__ static void mask(uint32_t (&acc_s)[kScores], int limit_0,
                                              int limit_1) {
    constexpr uint32_t kMinusInf2 = 0xFC00FC00u;
    const int t2 = (threadIdx.x & 3) * 2;
    const int limits[2] = {limit_0 - t2, limit_1 - t2};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = 16 * (i / 4) + 8 * ((i % 4) / 2);
      const int limit = limits[i % 2];
      const uint32_t low_only = (acc_s[i] & 0xFFFFu) | (kMinusInf2 & 0xFFFF0000u);
      acc_s[i] = key + 1 < limit ? acc_s[i] : (key < limit ? low_only : kMinusInf2);
    }
  }

  // Raises the bases that this block outgrows. Returns (for the whole warp) whether any grew; only
  // then alpha[r] = 2^(old - new) is set.
  __device__ __forceinline__ bool update(const uint32_t (&acc_s)[kScores], float k_descale,
                                         float (&alpha)[2]) {
    // Bounded from below so that masked scores stay -inf.
    scale_[0] = fmaxf(q_descale_[0] * k_descale, kMinScale);
    scale_[1] = fmaxf(q_descale_[1] * k_descale, kMinScale);
    uint32_t max_0 = acc_s[0], max_1 = acc_s[1];
#pragma unroll
    for (int i = 2; i < kScores; i += 2) {
      max_0 = ptx::max_f16x2(max_0, acc_s[i]);
      max_1 = ptx::max_f16x2(max_1, acc_s[i + 1]);
    }
    // Both rows in one register, (row g, row g + 8): this lane's keys only, which is enough to see
    // that no base grows.
    uint32_t both = ptx::max_f16x2(ptx::permute_bytes<0x5410>(max_0, max_1),
                                   ptx::permute_bytes<0x7632>(max_0, max_1));
    const bool outgrown = fmaf(ptx::low_f16_to_f32(both), scale_[0], -kSlack) > base_[0] ||
                          fmaf(ptx::high_f16_to_f32(both), scale_[1], -kSlack) > base_[1];
    const bool event =
        __any_sync(0xFFFFFFFFu, outgrown || fmaxf(scale_[0], scale_[1]) > kMaxHalfScale);
    if (event) {
      both = ptx::max_f16x2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 1));
      both = ptx::max_f16x2(both, __shfl_xor_sync(0xFFFFFFFFu, both, 2));
      const float y[2] = {ptx::low_f16_to_f32(both) * scale_[0],
                          ptx::high_f16_to_f32(both) * scale_[1]};
      bool outside = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        alpha[r] = 1.0f;
        if (y[r] - kSlack > base_[r]) {
          const float new_base =
              fmaxf(fminf(ceilf(y[r]) + Config::kHeadroom, kRoomyBase), ceilf(y[r] - kSlack));
          alpha[r] = ptx::exp2_f32(base_[r] - new_base);
          base_[r] = new_base;
          set_offset(r, new_base);
        }
        outside |=
            scale_[r] > kMaxHalfScale || (fabsf(base_[r]) > kMaxHalfBase && base_[r] > -INFINITY);
      }
      subtract_first_ = __any_sync(0xFFFFFFFFu, outside);
    }
    return event;
  }

  // Scores to bytes. The scores are used up.
  __device__ __forceinline__ void probabilities(uint32_t (&acc_s)[kScores],
                                                uint32_t (&frag_p)[kProbs]) const {
    uint32_t scale[2], offset[2] = {offset_[0], offset_[1]}, code_scale[2],
                       code_offset[2] = {code_offset_[0], code_offset_[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float half_scale = fminf(scale_[r], kMaxHalfScale);
      scale[r] = ptx::pack_f16x2(half_scale, half_scale);
      code_scale[r] = ptx::mul_f16x2(scale[r], 0x48004800u /* 8 */);
    }
    if (subtract_first_) {
      // Rare: logits beyond f16's exact integers. score * scale - base = (score - base / scale) *
      // scale, whose difference f16 takes without loss where the probability is not 0; what
      // rounding base / scale drops goes to the offset.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = base_[r] == -INFINITY ? 0.0f : base_[r];
        const uint32_t reference = ptx::pack_f16x2(base / scale_[r], base / scale_[r]);
        const float rest = ptx::low_f16_to_f32(reference) * scale_[r] - base;
        offset[r] = ptx::pack_f16x2(kOffset + rest, kOffset + rest);
        code_offset[r] =
            ptx::pack_f16x2(8.0f * (kOffset + rest) + 56.0f, 8.0f * (kOffset + rest) + 56.0f);
#pragma unroll
        for (int i = r; i < kScores; i += 2) acc_s[i] = ptx::sub_f16x2(acc_s[i], reference);
      }
    }
#pragma unroll
    for (int group = 0; group < kProbs / 2; ++group) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t &a = acc_s[4 * group + r], &b = acc_s[4 * group + 2 + r];
        if (uses_mufu(group)) {
          const auto y = [&](uint32_t& score) {
            return replace(score, ptx::fma_f16x2(score, scale[r], offset[r]));
          };
          frag_p[2 * group + r] =
              ptx::pack_e4m3x4_f16(ptx::exp2_f16x2(y(a)), ptx::exp2_f16x2(y(b)));
        } else {
          const auto code = [&](uint32_t& score) {
            return replace(score, e4m3_codes(score, code_scale[r], code_offset[r]));
          };
          // NOTE: one PRMT takes the low byte of each half: bytes 0, 2 of a's codes and 0, 2 of
          // b's.
          frag_p[2 * group + r] = ptx::permute_bytes<0x6420>(code(a), code(b));
        }
      }
    }
  }

  // Natural-log logsumexp of row g + 8r, given the sum of its bytes' values.
  __device__ __forceinline__ float logsumexp(int r, float row_sum, float q_shift) const {
    // The linear mantissa raises a probability by 4.07% in the mean: log2 of that.
    constexpr float kBias = Config::kExp2 == Exp2::kLinear ? 0.05757f : 0.0f;
    return (base_[r] - kOffset + ptx::log2_f32(row_sum) - kBias + q_shift) * 0.6931471805599453f;
  }

 private:
  static constexpr float kMinScale = 0x1p-24f;
  static constexpr float kMaxHalfScale = 4096.0f;  // 8 * scale is a normal f16
  static constexpr float kMaxHalfBase = 64.0f;     // f16's rounding of scale moves no y near the
                                                   // base by 1/16, where code 127 (NaN) would begin

  // What a score becomes takes its place, where that is faster.
  // NOTE: the next S seems to ptxas to read what it overwrites, so a score lives until then, or
  // until something takes its place. P V in slices is 5-7% slower so, head_dim 128 2% faster.
  __device__ __forceinline__ static uint32_t replace(uint32_t& score, uint32_t value) {
    if constexpr (!FwdTraits<Config>::kSliced) score = value;
    return value;
  }

  // kMufuEighths of the 16-key groups, evenly spread, take the special-function unit; the others
  // work on e4m3 codes.
  __device__ __forceinline__ static constexpr bool uses_mufu(int group) {
    return Config::kExp2 == Exp2::kExact &&
           (group + 1) * Config::kMufuEighths / 8 > group * Config::kMufuEighths / 8;
  }

  __device__ __forceinline__ void set_offset(int r, float base) {
    offset_[r] = ptx::pack_f16x2(kOffset - base, kOffset - base);
    code_offset_[r] =
        ptx::pack_f16x2(8.0f * (kOffset - base) + 56.0f, 8.0f * (kOffset - base) + 56.0f);
  }

  // The byte of an e4m3 number is 8 * log2(value) + 56 up to the curve of its mantissa. Works on
  // two f16 scores; the rounded byte ends in the low 8 bits of each half, because 1024 + u has an
  // f16 ulp of one.
  __device__ __forceinline__ static uint32_t e4m3_codes(uint32_t score, uint32_t code_scale,
                                                        uint32_t code_offset) {
    uint32_t u = ptx::fma_relu_f16x2(score, code_scale, code_offset);
    if (Config::kExp2 == Exp2::kExact) {
      // Mantissa 2^f - 1 instead of f: a triangle over the distance to the nearest power of two,
      // height 0.69 codes.
      constexpr uint32_t kEighth = 0x30003000u, kRound = 0x66006600u /* 1536 */,
                         kHeight = 0xBD85BD85u /* -1.38 */;
      const uint32_t whole = ptx::sub_f16x2(ptx::fma_f16x2(u, kEighth, kRound), kRound);
      const uint32_t distance = ptx::abs_f16x2(ptx::fma_f16x2(u, kEighth, ptx::neg_f16x2(whole)));
      u = ptx::fma_f16x2(distance, kHeight, u);
    }
    return ptx::add_f16x2(u, 0x64006400u /* 1024 */);
  }

  float q_descale_[2];
  float scale_[2];           // q_descale * k_descale of the current block
  float base_[2];            // integer-valued, -inf until the row has seen a key
  uint32_t offset_[2];       // f16x2, kOffset - base
  uint32_t code_offset_[2];  // f16x2, the same on the scale of e4m3 codes
  bool subtract_first_;      // warp-uniform: some base or scale is too large for the offsets above
};

}  // namespace jax_fa3
