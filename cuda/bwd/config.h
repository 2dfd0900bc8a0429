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
//   kApart      the math warpgroups run free, with V in registers; with kMakesDq a warpgroup of its own
//               makes dQ
//   kMakesDq    bwd_kernel adds up dQ in memory, in any order; else bwd_dq_kernel makes it
//   kDqWarpgroups        math warpgroups of bwd_dq_kernel, 64 query rows each
//   kDqKeyStages, kDqValueStages  depth of its rings of K and V
// A CTA of bwd_kernel owns 128 keys, 64 for each of its two math warpgroups. Head_dim 256 goes another
// way, always in a fixed order: see wide_keys.cuh.
template <class ElementType, bool kIsFixed>
struct BwdD64 {
  using Element = ElementType;
  static constexpr int kHeadDim = 64, kBlockQ = 64, kQStages = 4, kDoStages = 4;
  static constexpr int kScoreGradBuffers = kIsFixed ? 0 : 4;
  static constexpr bool kApart = true, kMakesDq = !kIsFixed;
  static constexpr int kDqWarpgroups = 3, kDqKeyStages = 4, kDqValueStages = 4;
};

template <class ElementType, bool kIsFixed>
struct BwdD128 {
  using Element = ElementType;
  static constexpr int kHeadDim = 128, kBlockQ = 64, kQStages = 3, kDoStages = kIsFixed ? 3 : 2;
  static constexpr int kScoreGradBuffers = kIsFixed ? 0 : 2;
  static constexpr bool kApart = false, kMakesDq = !kIsFixed;
  static constexpr int kDqWarpgroups = 2, kDqKeyStages = 3, kDqValueStages = 3;
};

// K and V come as codes. A kernel of its own, since the code for that moves the rest about: where it was in the
// kernel above, arrays took up to 1.2 % longer with the same instructions in the loop.
struct BwdCodesD128 : BwdD128<ptx::Bf16, false> {};

// The same where queries are many: Q comes as codes too, besides the array, and S is a float8 product. The codes
// of Q have as many stages as dO.
struct BwdFloat8D128 : BwdD128<ptx::Bf16, false> {
  static constexpr int kQStages = 2;
};

template <class ElementType>
struct BwdD256 {
  using Element = ElementType;
  static constexpr int kHeadDim = 256;
  static constexpr int kDqWarpgroups = 2, kDqKeyStages = 2, kDqValueStages = 1;
};

// ---- what follows from a config -----------------------------------------------------------------
template <class Config>
struct BwdTraits {
  using Element = typename Config::Element;
  static constexpr bool kIsBf16 = std::is_same_v<Element, ptx::Bf16>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr bool kMakesDq = Config::kMakesDq;
  static constexpr int kBlockQ = Config::kBlockQ;
  static constexpr int kQStages = Config::kQStages, kDoStages = Config::kDoStages;
  static constexpr int kScoreGradBuffers = Config::kScoreGradBuffers;
  static constexpr bool kApart = Config::kApart;
  static constexpr bool kDqRole = kApart && kMakesDq;
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kMathWarps = 4 * kMathWarpgroups;
  static constexpr int kMathThreads = 32 * kMathWarps;
  static constexpr int kBlockKv = 64 * kMathWarpgroups;
  static constexpr int kThreads = (kMathWarpgroups + 1 + kDqRole) * 128;
  static constexpr int kLoadRegisters = 24, kMathRegisters = kDqRole ? 208 : 240;
  static constexpr int kQueryGradRegisters = 72;  // kDqRole
  static constexpr int kStagingWarps = kApart ? 4 * kDqRole : kMathWarps;
  // Named barrier of the warps that make dQ: see kernel.cuh.
  static constexpr int kDqBarrier = 1, kDqThreads = 32 * kStagingWarps;
  // Whether two CTAs may share the copies of Q and dO, a chunk each: see kernel.cuh.
  static constexpr bool kCanPair = kHeadDim == 128 && kMakesDq;
  // Whether CTAs may clear the sums of dQ of later heads and prepare their rows: see clear.cuh, serve.cuh.
  static constexpr bool kServes = kHeadDim == 128 && kMakesDq;
  // Whether S is a float8 product: see load_codes.cuh.
  static constexpr bool kFloat8Scores = std::is_same_v<Config, BwdFloat8D128>;
  // Whether K and V come as codes: see decode_keys.cuh.
  static constexpr bool kTakesCodes = std::is_same_v<Config, BwdCodesD128> || kFloat8Scores;
  // Whether spare warps may prepare rows; codes leave no room for what they bring.
  static constexpr bool kServesRows = kServes && !kFloat8Scores;
  // kServes: what is cleared at once.
  static constexpr int kZeroBytes = kFloat8Scores ? 512 : 4096;

  // bwd_causal_kernel: how many instructions move its loop to a line of the instruction cache: where it begins
  // between lines it takes up to 1.1 % longer. sass_gate.py looks whether they still do.
  static constexpr int kLoopFill = kFloat8Scores ? 4 : kTakesCodes ? 6 : kIsBf16 ? 4 : 2;
  // kFloat8Scores: the same for bwd_kernel.
  static constexpr int kFreeLoopFill = kFloat8Scores ? 6 : 0;

  static constexpr int kChunks = kHeadDim / 64;  // 64-column chunks of a tile, 128 bytes a row
  static constexpr int kQueryChunkBytes = kBlockQ * 128;
  static constexpr int kKeyChunkBytes = kBlockKv * 128;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kKeyBytes = kChunks * kKeyChunkBytes;
  static constexpr int kRowBytes = kBlockQ * 4 * bwd_row_words(kHeadDim);  // a step's row numbers
  static constexpr int kScoreGradBytes = kBlockKv * kBlockQ * 2;
  static constexpr int kQueryCodeBytes = kFloat8Scores * kBlockQ * kHeadDim;
  static constexpr int kKeyCodeBytes = kFloat8Scores * kBlockKv * kHeadDim;

  static_assert(kBlockQ == kPieceRows && kChunks == (kApart ? 1 : kMathWarpgroups),
                "a step makes one 64 x 64 piece of dQ for each warpgroup that takes part");
  static_assert(kBwdRowPad % kBlockQ == 0, "the workspaces hold whole q tiles");
  static_assert(kQStages >= 2 && kQStages <= 4 && kDoStages >= 1 && kDoStages <= 4,
                "the Q ring has 2 to 4 stages, the dO ring 1 to 4");
  static_assert(!kFloat8Scores || kBlockQ == kSlab, "the codes of a step have one factor");
};

// Head_dim 256: a CTA of bwd_wide_keys_kernel owns 64 keys.
template <class ElementType>
struct BwdTraits<BwdD256<ElementType>> {
  using Element = ElementType;
  static constexpr bool kIsBf16 = std::is_same_v<Element, ptx::Bf16>;
  static constexpr int kHeadDim = 256;
  static constexpr bool kMakesDq = false, kDqRole = false;
  static constexpr int kBlockQ = 64, kBlockKv = 64, kQStages = 2, kDoStages = 2;
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kMathWarps = 4 * kMathWarpgroups;
  static constexpr int kMathThreads = 32 * kMathWarps;
  static constexpr int kThreads = (kMathWarpgroups + 1) * 128;
  static constexpr int kLoadRegisters = 24, kMathRegisters = 240;
  static constexpr int kStagingWarps = 0;
  static constexpr bool kCanPair = false, kTakesCodes = false, kServes = false, kServesRows = false,
                        kFloat8Scores = false;
  static constexpr int kZeroBytes = 4096, kQueryCodeBytes = 0, kKeyCodeBytes = 0;

  static constexpr int kChunks = kHeadDim / 64;  // 64-column chunks of a tile, 128 bytes a row
  static constexpr int kQueryChunkBytes = 64 * 128, kKeyChunkBytes = 64 * 128;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kKeyBytes = kChunks * kKeyChunkBytes;
  static constexpr int kRowBytes = kBlockQ * 4 * bwd_row_words(kHeadDim);  // a step's row numbers
  static constexpr int kScoreGradBuffers = 2, kScoreGradBytes = 64 * 64 * 4;  // P instead, in f32
};

// The kernel that makes dQ alone: every operand is cut into tiles of 64 rows and all columns.
template <class Config>
struct BwdDqTraits {
  using Element = typename Config::Element;
  static constexpr bool kIsBf16 = std::is_same_v<Element, ptx::Bf16>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kMathWarpgroups = Config::kDqWarpgroups, kMathWarps = 4 * kMathWarpgroups;
  static constexpr int kMathThreads = 32 * kMathWarps;
  static constexpr int kBlockQ = 64 * kMathWarpgroups, kBlockKv = 64;
  static constexpr int kKeyStages = Config::kDqKeyStages, kValueStages = Config::kDqValueStages;
  // Operands that stay for the whole tile: in registers where these suffice.
  static constexpr bool kQueriesInRegisters = kHeadDim == 128,
                        kOutGradsInRegisters = kHeadDim <= 128;
  static constexpr bool kScoresFirst = kValueStages > 1;  // else dQ, which frees a stage
  static constexpr int kThreads = (kMathWarpgroups + 1) * 128;
  static constexpr int kLoadRegisters = 24, kMathRegisters = kMathWarpgroups == 2 ? 240 : 160;

  static constexpr int kChunks = kHeadDim / 64;  // 64-column chunks of a tile, 128 bytes a row
  static constexpr int kChunkBytes = 64 * 128;
  static constexpr int kTileBytes = kChunks * kChunkBytes;
};

// Starts the kernels of one config: launch.cuh defines it, instantiations/ compiles it.
template <class Config>
cudaError_t launch_bwd(BwdParams params, cudaStream_t stream);

}  // namespace jax_fa3
