// The backward kernels that exist: one type per kernel, every limit a static_assert with a sentence.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/layout.h"
#include "../ptx/wgmma.cuh"
#include "params.h"

namespace jax_fa3 {

// ---- the table ----------------------------------------------------------------------------------
// Fields of a config:
//   kBlockQ     query rows per step
//   kQStages, kDoStages  depth of the rings of Q and dO
//   kScoreGradBuffers    tiles of dS^T
//   kApart      a warpgroup of its own makes dQ; V stays in the registers of the math warpgroups
// A CTA owns 128 keys, 64 for each of its two math warpgroups. Head_dim 256 goes another way: see
// wide_keys.cuh and wide_queries.cuh.
template <class ElementType>
struct BwdD64 {
  using Element = ElementType;
  static constexpr int kHeadDim = 64, kBlockQ = 64, kQStages = 4, kDoStages = 4;
  static constexpr int kScoreGradBuffers = 3;
  static constexpr bool kApart = true;
};

template <class ElementType>
struct BwdD128 {
  using Element = ElementType;
  static constexpr int kHeadDim = 128, kBlockQ = 64, kQStages = 3, kDoStages = 2;
  static constexpr int kScoreGradBuffers = 2;
  static constexpr bool kApart = false;
};

template <class ElementType>
struct BwdD256 {
  using Element = ElementType;
  static constexpr int kHeadDim = 256;
};

// ---- what follows from a config -----------------------------------------------------------------
template <class Config>
struct BwdTraits {
  using Element = typename Config::Element;
  static constexpr bool kIsBf16 = std::is_same_v<Element, ptx::Bf16>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr bool kSumsInMemory = true;  // dQ is added up in dq_acc
  static constexpr int kBlockQ = Config::kBlockQ;
  static constexpr int kQStages = Config::kQStages, kDoStages = Config::kDoStages;
  static constexpr int kScoreGradBuffers = Config::kScoreGradBuffers;
  static constexpr bool kApart = Config::kApart;
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kMathWarps = 4 * kMathWarpgroups;
  static constexpr int kMathThreads = 32 * kMathWarps;
  static constexpr int kBlockKv = 64 * kMathWarpgroups;
  static constexpr int kThreads = (kMathWarpgroups + 1 + kApart) * 128;
  static constexpr int kLoadRegisters = 24, kMathRegisters = kApart ? 208 : 240;
  static constexpr int kQueryGradRegisters = 72;  // kApart
  static constexpr int kStagingWarps = kApart ? 4 : kMathWarps;

  static constexpr int kChunks = kHeadDim / 64;  // 64-column chunks of a tile, 128 bytes a row
  static constexpr int kQueryChunkBytes = kBlockQ * 128;
  static constexpr int kKeyChunkBytes = kBlockKv * 128;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kKeyBytes = kChunks * kKeyChunkBytes;
  static constexpr int kRowBytes = kBlockQ * 4 * bwd_row_words(kHeadDim);  // a step's row numbers
  static constexpr int kScoreGradBytes = kBlockKv * kBlockQ * 2;

  static_assert(kBlockQ == kPieceRows && kChunks == (kApart ? 1 : kMathWarpgroups),
                "a step makes one 64 x 64 piece of dQ for each warpgroup that takes part");
  static_assert(kBwdRowPad % kBlockQ == 0, "the workspaces hold whole q tiles");
  static_assert(kQStages >= 2 && kQStages <= 4 && kDoStages >= 1 && kDoStages <= 4,
                "the Q ring has 2 to 4 stages, the dO ring 1 to 4");
};

// Head_dim 256: every operand is cut into tiles of 64 rows and all columns.
template <class ElementType>
struct BwdTraits<BwdD256<ElementType>> {
  using Element = ElementType;
  static constexpr bool kIsBf16 = std::is_same_v<Element, ptx::Bf16>;
  static constexpr int kHeadDim = 256;
  static constexpr bool kSumsInMemory = false;
  static constexpr int kBlockQ = 64, kBlockKv = 64;  // of the kernel for dK and dV
  static constexpr int kQueryTiles = 2;              // of a CTA of the kernel for dQ
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kMathWarps = 4 * kMathWarpgroups;
  static constexpr int kMathThreads = 32 * kMathWarps;
  static constexpr int kThreads = (kMathWarpgroups + 1) * 128;
  static constexpr int kLoadRegisters = 24, kMathRegisters = 240;

  static constexpr int kChunks = kHeadDim / 64;  // 64-column chunks of a tile, 128 bytes a row
  static constexpr int kChunkBytes = 64 * 128;
  static constexpr int kTileBytes = kChunks * kChunkBytes;
  static constexpr int kRowBytes = 64 * 4 * bwd_row_words(kHeadDim);  // a tile's row numbers

  static_assert(kBwdRowPad % (64 * kQueryTiles) == 0, "the workspaces hold whole q tiles");
};

// Starts the kernels of one config: launch.cuh defines it for head_dim 64 and 128, wide_launch.cuh
// the other one for 256; instantiations/ compiles them.
template <class Config>
cudaError_t launch_bwd(BwdParams params, cudaStream_t stream);
template <class Config>
cudaError_t launch_bwd_wide(BwdParams params, cudaStream_t stream);

}  // namespace jax_fa3
