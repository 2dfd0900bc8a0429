// The forward kernels that exist: one type per kernel, every limit a static_assert with a sentence.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../common/layout.h"
#include "../ptx/wgmma.cuh"
#include "params.h"

namespace jax_fa3 {

// ---- the table ----------------------------------------------------------------------------------
// Fields of a config:
//   kBlockKv         keys per step
//   kMathWarpgroups  64 rows of the q tile each
//   kClusterSize     2: CTAs share copies of K and V where two tiles walk over the same keys (Pairing)
//   kNumStages       depth of the K and V rings
//   kQueryStages     q tiles in shared memory: with more than 1 the next one is loaded early, with 3
//                    even behind short tiles; with 1 it comes beside the last P V and the output
//   kPipeline        what overlaps (params.h)
//   kSeam            how one tile follows another (params.h, math_overlapped.cuh); with rings of 2
//                    stages the next keys come too late for anything but kPlain
//   kTwoProbBuffers  P of this block is packed while P V of the last one still reads its own; costs
//                    registers and code
// and for FP8:
//   kExp2            kExact or kLinear
//   kMufuEighths     kExact: share of the exponentials that the special-function unit takes
//   kHeadroom        how far above its row's maximum a fresh base is set, while it is small; spares
//                    rescales
//   kPromoteEvery    blocks summed by the tensor core before they join the f32 sum; with kSliced only
//                    the first ones are, where the output stands
template <class ElementType, Exp2 kMode>
struct FwdFp8D64 {
  using Element = ElementType;
  static constexpr int kHeadDim = 64, kBlockKv = 128, kMathWarpgroups = 3, kNumStages = 4;
  static constexpr int kQueryStages = 3, kClusterSize = 1;
  static constexpr Pipeline kPipeline = Pipeline::kBoth;
  static constexpr Seam kSeam = Seam::kScores;
  static constexpr bool kTwoProbBuffers = true;
  static constexpr Exp2 kExp2 = kMode;
  static constexpr int kMufuEighths = 4, kPromoteEvery = 4;
  static constexpr float kHeadroom = 2.0f;
};

template <class ElementType, Exp2 kMode>
struct FwdFp8D128 {
  using Element = ElementType;
  static constexpr int kHeadDim = 128, kBlockKv = 128, kMathWarpgroups = 2, kNumStages = 4;
  static constexpr int kQueryStages = 3, kClusterSize = 1;
  static constexpr Pipeline kPipeline = Pipeline::kIntra;
  static constexpr Seam kSeam = Seam::kLooksAhead;
  static constexpr bool kTwoProbBuffers = true;
  static constexpr Exp2 kExp2 = kMode;
  static constexpr int kMufuEighths = 4, kPromoteEvery = 4;
  static constexpr float kHeadroom = 2.0f;
};

// Output and its short sums would take 264 registers: the first kPromoteEvery blocks are summed
// where the output stands, P V of the others runs in slices of columns (math_sliced.cuh), and each
// of them is promoted.
template <class ElementType, Exp2 kMode>
struct FwdFp8D256 {
  using Element = ElementType;
  static constexpr int kHeadDim = 256, kBlockKv = 128, kMathWarpgroups = 2, kNumStages = 2;
  static constexpr int kQueryStages = 2, kClusterSize = 2;
  static constexpr Pipeline kPipeline = Pipeline::kSerial;
  static constexpr Seam kSeam = Seam::kPlain;
  static constexpr bool kTwoProbBuffers = false;
  static constexpr Exp2 kExp2 = kMode;
  static constexpr int kMufuEighths = 4, kPromoteEvery = 4;
  static constexpr float kHeadroom = 2.0f;
};

template <class ElementType>
struct Fwd16D64 {
  using Element = ElementType;
  static constexpr int kHeadDim = 64, kBlockKv = 128, kMathWarpgroups = 3, kNumStages = 4;
  static constexpr int kQueryStages = 3, kClusterSize = 1;
  static constexpr Pipeline kPipeline = Pipeline::kBoth;
  static constexpr Seam kSeam = Seam::kScores;
  static constexpr bool kTwoProbBuffers = false;
};

template <class ElementType>
struct Fwd16D128 {
  using Element = ElementType;
  static constexpr int kHeadDim = 128, kBlockKv = 128, kMathWarpgroups = 2, kNumStages = 2;
  static constexpr int kQueryStages = 2, kClusterSize = 1;
  static constexpr Pipeline kPipeline = Pipeline::kIntra;
  static constexpr Seam kSeam = Seam::kPlain;
  static constexpr bool kTwoProbBuffers = true;
};

template <class ElementType>
struct Fwd16D256 {
  using Element = ElementType;
  static constexpr int kHeadDim = 256, kBlockKv = 64, kMathWarpgroups = 2, kNumStages = 2;
  static constexpr int kQueryStages = 1, kClusterSize = 1;
  static constexpr Pipeline kPipeline = Pipeline::kIntra;
  static constexpr Seam kSeam = Seam::kPlain;
  static constexpr bool kTwoProbBuffers = true;
};

// ---- what follows from a config -----------------------------------------------------------------
template <class Config>
constexpr bool promotes_in_time() {
  if constexpr (std::is_same_v<typename Config::Element, ptx::E4m3> ||
                std::is_same_v<typename Config::Element, ptx::E5m2>) {
    return Config::kPromoteEvery >= 1 && Config::kPromoteEvery <= 4;
  } else {
    return true;
  }
}

template <class Config>
struct FwdTraits {
  using Element = typename Config::Element;
  static constexpr bool kIsFp8 =
      std::is_same_v<Element, ptx::E4m3> || std::is_same_v<Element, ptx::E5m2>;
  using Params = std::conditional_t<kIsFp8, Fp8Params, NativeParams>;

  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockQ = Config::kMathWarpgroups * 64;
  static constexpr int kBlockKv = Config::kBlockKv;
  static constexpr int kMathWarpgroups = Config::kMathWarpgroups;
  static constexpr int kMathWarps = kMathWarpgroups * 4;
  static constexpr int kMathThreads = kMathWarps * 32;
  static constexpr int kThreads = kMathThreads + 128;
  static constexpr int kNumStages = Config::kNumStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  static constexpr bool kIntra =
      Config::kPipeline == Pipeline::kIntra || Config::kPipeline == Pipeline::kBoth;
  static constexpr bool kPingPong =
      Config::kPipeline == Pipeline::kPingPong || Config::kPipeline == Pipeline::kBoth;

  // FP8 issues P V with 8 more columns: the first holds ones, so that column kHeadDim of the result
  // is the row sum.
  static constexpr int kValueColumns = kIsFp8 ? kHeadDim + 8 : kHeadDim;

  static constexpr int kElementBytes = kIsFp8 ? 1 : 2;
  static constexpr int kQueryBytes = kBlockQ * kHeadDim * kElementBytes;
  static constexpr int kKeyBytes = kBlockKv * kHeadDim * kElementBytes;
  static constexpr int kValueBytes = kHeadDim * kBlockKv * kElementBytes;  // what one copy brings
  static constexpr int kValueStageBytes =
      kValueColumns * kBlockKv * kElementBytes;  // with the ones rows

  // Whether two CTAs can share copies of K and V; those of a launch do unless its Pairing is kNone.
  static constexpr bool kCanPair = Config::kClusterSize == 2;

  // FP8 with head_dim 256 sums P V in slices of columns.
  static constexpr bool kSliced = kIsFp8 && kHeadDim == 256;

  // Columns of a q or k tile lie in chunks of 128 bytes: chunk after chunk in a slab of 64 rows
  // (FP8) or in the tile.
  static constexpr int kRowBytes = kHeadDim * kElementBytes < 128 ? kHeadDim * kElementBytes : 128;
  static constexpr int kQueryChunkRows = kIsFp8 ? kSlab : kBlockQ;

  // What else a tile needs: q_descale, q_shift of its rows, v_descale, v_mean of its head.
  static constexpr int kFactorBytes = kIsFp8 ? (2 * kBlockQ + 2 * kHeadDim) * 4 : 0;

  // setmaxnreg: what the load warpgroup gives up the math warpgroups take.
  static constexpr int kLoadRegisters = kMathWarpgroups == 3 ? 32 : 40;
  static constexpr int kMathRegisters = kMathWarpgroups == 3 ? 160 : 232;

  // Output staging: each math warp turns 64 columns of its 16 rows at a time.
  static constexpr int kStagingBytes = 16 * 64 * 2;

  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256,
                "head_dim must be 64, 128 or 256");
  static_assert(
      kMathWarpgroups == 2 || kMathWarpgroups == 3,
      "2 or 3 math warpgroups: the register file holds no more, and 1 cannot hide the softmax");
  static_assert(kNumStages >= 2 && kNumStages <= 4, "the K and V rings have 2 to 4 stages");
  static_assert(kQueryStages >= 1 && kQueryStages <= 3, "one to three q tiles in shared memory");
  static_assert(Config::kSeam == Seam::kPlain || kQueryStages > 1,
                "the next q tile must be there before this one is given back");
  // A warpgroup that waits for them may still hold values of its own last block.
  static_assert(Config::kSeam == Seam::kPlain ||
                    Config::kClusterSize * kBlockQ - 64 <= (kNumStages - 1) * kBlockKv,
                "the next tile's keys follow all blocks of this one, in a ring that has room");
  static_assert(kQueryStages > 1 || !kIsFp8, "the factors of an FP8 tile stay to its end");
  static_assert(Config::kClusterSize == 1 || Config::kClusterSize == 2,
                "one or two CTAs share copies");
  static_assert(!kCanPair || (kIsFp8 && kHeadDim > 64),
                "pairs share images of FP8; beside three math warpgroups the load thread has no "
                "registers for them");
  static_assert(kBlockKv % 16 == 0 && kBlockKv <= 256, "P V takes 16 keys a step");
  static_assert(!kIsFp8 || kBlockKv == kGranule, "one k_descale must cover the kv block");
  static_assert(promotes_in_time<Config>(),
                "kPromoteEvery is 1 to 4: a longer FP8 sum loses its small terms");
  static_assert(!kSliced || (!kIntra && !Config::kTwoProbBuffers && Config::kSeam == Seam::kPlain),
                "slices overlap with the other warpgroup's softmax only");
  static_assert(kQueryBytes % 1024 == 0 && kKeyBytes % 1024 == 0 && kValueStageBytes % 1024 == 0,
                "every tile starts on a 1024-byte boundary, which the swizzles count from");
};

// Starts the kernel of one config; launch.cuh defines it, instantiations/ compiles it.
template <class Config>
cudaError_t launch_fwd(typename FwdTraits<Config>::Params params, cudaStream_t stream);

}  // namespace jax_fa3
