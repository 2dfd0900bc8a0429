// Byte layouts of the FP8 operand images that the quantiser writes and the forward reads.
//
// An image is what shared memory must hold: one bulk copy brings a tile, and wgmma reads it as it
// lies. Everything here is constexpr and runs on the host too, where the tests prove it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FA3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FA3_HOST_DEVICE inline
#endif

namespace jax_fa3 {

// Keys that share one k_descale and lie in one v_image granule; also the kv tile of the FP8
// forward.
inline constexpr int kGranule = 128;
// Granules of all kv heads with which the quantiser fills the card; with fewer, launches that wait for the means
// or the images are done sooner if they start when these are there.
inline constexpr int kFullGranules = 256;
// Rows of q_image are padded to whole slabs; one math warpgroup owns one slab.
inline constexpr int kSlab = 64;
// Largest magnitude stored for q and k: range * range * head_dim stays inside f16 (65,504).
FA3_HOST_DEVICE constexpr float operand_range(int head_dim) {
  return head_dim <= 128 ? 16.0f : 8.0f;
}

// P is stored as 2^kProbabilityOffset times the probability of the row's base, to use e4m3's range.
inline constexpr float kProbabilityOffset = 8.0f;

FA3_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Position of 16-byte chunk `chunk` of row `row` in a tile whose rows are `row_bytes` long (64 or
// 128), as the tensor core's 64-byte and 128-byte swizzles expect it. Rows count from a 1024-byte
// boundary.
FA3_HOST_DEVICE constexpr int swizzled_chunk(int row_bytes, int row, int chunk) {
  return row_bytes == 128 ? (chunk ^ (row & 7)) : (chunk ^ ((row >> 1) & 3));
}

// Byte offset of element (row, column) in a q_image (groups of kSlab rows) or k_image (groups of
// kGranule rows) of 1-byte elements. Rows are head_dim bytes long; a head_dim of 256 is stored as
// two halves of 128 columns, one after the other in every group of rows.
FA3_HOST_DEVICE constexpr int64_t row_image_offset(int head_dim, int group_rows, int64_t row,
                                                   int column) {
  const int row_bytes = head_dim < 128 ? head_dim : 128;
  const int64_t in_group = row % group_rows;
  return (row - in_group) * head_dim + (column / row_bytes) * (group_rows * row_bytes) +
         in_group * row_bytes +
         swizzled_chunk(row_bytes, static_cast<int>(row & 7), column % row_bytes >> 4) * 16 +
         (column & 15);
}

// Where key `key` (0..15) of a 16-key group lies inside the group's 16 bytes. The score
// accumulators of one lane (keys 2t, 2t+1, 8+2t, 8+2t+1) become its four A-operand bytes without
// moving data between lanes.
FA3_HOST_DEVICE constexpr int key_position(int key) {
  return ((key & 7) >> 1) * 4 + (key >> 3) * 2 + (key & 1);
}

// Byte offset of (channel, key) inside one v_image granule [head_dim][kGranule].
FA3_HOST_DEVICE constexpr int value_image_offset(int channel, int key) {
  return channel * kGranule + swizzled_chunk(kGranule, channel & 7, key >> 4) * 16 +
         key_position(key & 15);
}

}  // namespace jax_fa3
