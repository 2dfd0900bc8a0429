// Online softmax of the bfloat16 and float16 forward: f32 scores in, 16-bit probabilities in wgmma
// A-operand order out.
//
// A lane holds rows g and g + 8 of its warp's 16 rows (g = lane / 4); acc_s[4j + {0, 1}] are keys
// 8j + 2t, +1 of row g (t = lane % 4), acc_s[4j + {2, 3}] the same of row g + 8. Pairs become
// A-operand registers in order.
//
// Numerics. y = score * scale is the logit in log2 units and P = 2^(y - base). A base is replaced
// only when it is outgrown: a score passes it by kSlack, or, where maxima are not looked for, the
// probabilities of a lane's keys of a row add up to more than such scores could. So P <= 2^13, which
// both element types hold; the sum and the output carry the same factor and are f32.
#pragma once

#include "../ptx/convert.cuh"
#include "config.h"

namespace jax_fa3 {

template <class Element, int kBlockKv>
class Softmax16 {
 public:
  static constexpr int kScores = kBlockKv / 2;  // registers: 64 rows over 128 lanes
  static constexpr int kProbs = kBlockKv / 4;   // registers of two 16-bit values
  static constexpr float kSlack = 8.0f;

  // `scale` = softmax_scale * log2(e); its sign goes to the scores, and zero becomes tiny so that
  // -inf stays -inf.
  __device__ __forceinline__ void start_tile(float scale) {
    negate_ = scale < 0.0f;
    const float size = fabsf(scale);
    scale_ = size < 1e-30f ? 1e-30f : size;
    base_[0] = base_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;
  }

  __device__ __forceinline__ void apply_sign(float (&acc_s)[kScores]) const {
    if (negate_) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) acc_s[i] = -acc_s[i];
    }
  }

  // Key limits are relative to the block: row g sees keys below limit_0, row g + 8 keys below
  // limit_1.
  __device__ __forceinline__ static void mask(float (&acc_s)[kScores], int limit_0, int limit_1) {
    const int t2 = (threadIdx.x & 3) * 2;
    const int limits[2] = {limit_0 - t2, limit_1 - t2};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = 8 * (i / 4) + (i & 1);
      if (key >= limits[(i % 4) / 2]) acc_s[i] = -INFINITY;
    }
  }

  // Raises the bases that this block outgrows, as a lane's own keys show first. Returns (for the
  // whole warp) whether any lane saw one; only then alpha[r] = 2^(old - new) is set.
  __device__ __forceinline__ bool update(const float (&acc_s)[kScores], float (&alpha)[2]) {
    float y[2];
    maxima(acc_s, y);
    const bool outgrown = y[0] * scale_ > base_[0] + kSlack || y[1] * scale_ > base_[1] + kSlack;
    const bool event = __any_sync(0xFFFFFFFFu, outgrown);
    if (event) raise_bases(y, alpha);
    return event;
  }

  // Scores to probabilities in place, and their sums.
  __device__ __forceinline__ void exponentials(float (&acc_s)[kScores]) {
    float sums[2];
    exponentials(acc_s, sums, [&](int i, float p0, float p1) {
      acc_s[i] = p0;
      acc_s[i + 1] = p1;
    });
    sum_[0] += sums[0];
    sum_[1] += sums[1];
  }

  __device__ __forceinline__ static void pack(const float (&acc_s)[kScores],
                                              uint32_t (&frag_p)[kProbs]) {
#pragma unroll
    for (int i = 0; i < kProbs; ++i) frag_p[i] = packed(acc_s[2 * i], acc_s[2 * i + 1]);
  }

  // All of the above at once where the scores outlive it. Maxima are not looked for in advance: a
  // lane's sum of probabilities tells that a base was outgrown, and then the block is done again.
  // Of the first block of a tile (`is_first`) that is known.
  __device__ __forceinline__ bool probabilities(const float (&acc_s)[kScores],
                                                uint32_t (&frag_p)[kProbs], float (&alpha)[2],
                                                bool is_first) {
    // What a lane's keys of a row can add up to when none passes its base by more than kSlack.
    constexpr float kMaxSum = (1 << static_cast<int>(kSlack)) * (kScores / 2);
    float sums[2];
    bool event = is_first;
    while (true) {
      if (event) {
        float y[2];
        maxima(acc_s, y);
        raise_bases(y, alpha);
      }
      exponentials(acc_s, sums, [&](int i, float p0, float p1) { frag_p[i / 2] = packed(p0, p1); });
      if (event) break;
      event = __any_sync(0xFFFFFFFFu, sums[0] > kMaxSum || sums[1] > kMaxSum ||
                                          fminf(base_[0], base_[1]) == -INFINITY);
      if (!event) break;
    }
    sum_[0] += sums[0];
    sum_[1] += sums[1];
    return event;
  }

  // Sum over all keys of row g + 8r (the quad's lanes hold parts).
  __device__ __forceinline__ float row_sum(int r) const {
    float sum = sum_[r];
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  }

  __device__ __forceinline__ float logsumexp(int r, float row_sum, float) const {
    return (base_[r] + ptx::log2_f32(row_sum)) * 0.6931471805599453f;
  }

 private:
  // Largest scores among this lane's keys.
  __device__ __forceinline__ static void maxima(const float (&acc_s)[kScores], float (&y)[2]) {
    y[0] = fmaxf(acc_s[0], acc_s[1]);
    y[1] = fmaxf(acc_s[2], acc_s[3]);
#pragma unroll
    for (int i = 4; i < kScores; i += 4) {
      y[0] = fmaxf(y[0], fmaxf(acc_s[i], acc_s[i + 1]));
      y[1] = fmaxf(y[1], fmaxf(acc_s[i + 2], acc_s[i + 3]));
    }
  }

  __device__ __forceinline__ void raise_bases(float (&y)[2], float (&alpha)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      y[r] = fmaxf(y[r], __shfl_xor_sync(0xFFFFFFFFu, y[r], 1));
      y[r] = fmaxf(y[r], __shfl_xor_sync(0xFFFFFFFFu, y[r], 2)) * scale_;
      alpha[r] = 1.0f;
      if (y[r] > base_[r] + kSlack) {
        // The maximum itself: a row with one key gets P = 1 up to the rounding of y.
        alpha[r] = ptx::exp2_f32(base_[r] - y[r]);
        base_[r] = y[r];
        sum_[r] *= alpha[r];
      }
    }
  }

  // Hands probabilities to `take` in pairs of neighbours; `sums` are those of this lane's rows.
  template <class Take>
  __device__ __forceinline__ void exponentials(const float (&acc_s)[kScores], float (&sums)[2],
                                               const Take& take) const {
    const float shift[2] = {base_[0] == -INFINITY ? 0.0f : -base_[0],
                            base_[1] == -INFINITY ? 0.0f : -base_[1]};
    float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i % 4 / 2;
      const float p0 = ptx::exp2_f32(fmaf(acc_s[i], scale_, shift[r]));
      const float p1 = ptx::exp2_f32(fmaf(acc_s[i + 1], scale_, shift[r]));
      parts[2 * r] += p0;
      parts[2 * r + 1] += p1;
      take(i, p0, p1);
    }
    sums[0] = parts[0] + parts[1];
    sums[1] = parts[2] + parts[3];
  }

  __device__ __forceinline__ static uint32_t packed(float p0, float p1) {
    return std::is_same_v<Element, ptx::Bf16> ? ptx::pack_bf16x2(p0, p1) : ptx::pack_f16x2(p0, p1);
  }

  bool negate_;
  float scale_;
  float base_[2];  // -inf until the row has seen a key
  float sum_[2];   // this lane's part
};

}  // namespace jax_fa3
