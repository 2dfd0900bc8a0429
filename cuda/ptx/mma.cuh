// mma.sync: a warp's small 16-bit product, from registers to registers.
#pragma once

#include <cstdint>

namespace jax_fa3::ptx {

// mma.sync.m16n8k16: d[16][8] = A[16][16] B[16][8] in float32 accumulators; called by whole warps. With
// g = lane / 4 and t = lane % 4 a lane holds, as pairs of 16-bit values,
//   a[0], a[1]  columns 2t, 2t + 1 of rows g, g + 8;   a[2], a[3]  columns 2t + 8, 2t + 9 of them
//   b0, b1      rows 2t, 2t + 1 and 2t + 8, 2t + 9 of column g
//   d[0], d[1]  columns 2t, 2t + 1 of row g;           d[2], d[3]  of row g + 8
// `d` is added to. Products are exact; what lies below the last bit of a sum's largest term is cut off.
#if defined(__CUDACC__)
template <bool kIsBf16>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (kIsBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
#else  // on the host the tests bring their own
template <bool kIsBf16>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#endif

}  // namespace jax_fa3::ptx
