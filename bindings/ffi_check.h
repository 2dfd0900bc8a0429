// Checks that memory safety needs, in the message form of the package. Python has checked
// everything a user can get wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "cuda/common/device.h"
#include "cuda/common/element_kind.h"
#include "cuda/common/layout.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fa3 {

namespace ffi = ::xla::ffi;

template <class Dimensions>
std::string shape_text(const Dimensions& dims) {
  std::string text;
  for (int64_t size : dims) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// The sizes that every handler shares.
struct Sizes {
  int64_t batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim;
};

// Whether the device is done with a call so soon that the host's time matters.
inline bool is_short(const Sizes& s) {
  constexpr int64_t kRows = 1 << 16;
  return s.batch * s.num_heads_q * s.seqlen_q <= kRows &&
         s.batch * s.num_heads_kv * s.seqlen_k <= kRows;
}

// Into the fields of the same names; head_dim selects a kernel and is no field everywhere.
template <class Params>
void fill_sizes(Params& params, const Sizes& sizes) {
  params.batch = static_cast<int>(sizes.batch);
  params.seqlen_q = static_cast<int>(sizes.seqlen_q);
  params.seqlen_k = static_cast<int>(sizes.seqlen_k);
  params.num_heads_q = static_cast<int>(sizes.num_heads_q);
  params.num_heads_kv = static_cast<int>(sizes.num_heads_kv);
}

// Collects the first failed check; `where` is the target's name.
class Checker {
 public:
  explicit Checker(const char* where) : where_(where) {}

  bool failed() const { return error_.has_value(); }
  ffi::Error take() const { return *error_; }

  void fail(ffi::ErrorCode code, const std::string& message) {
    if (!error_) error_ = ffi::Error(code, std::string(where_) + ": " + message);
  }

  // `message` returns the text, which nobody writes while the check holds: every call runs these.
  template <class Message>
  void require(bool holds, const Message& message) {
    if (!holds) fail(ffi::ErrorCode::kInvalidArgument, message());
  }

  // Exact shape.
  template <class BufferType>
  void shape(const char* name, const BufferType& buffer, std::initializer_list<int64_t> expected) {
    const auto dims = buffer.dimensions();
    require(std::equal(dims.begin(), dims.end(), expected.begin(), expected.end()), [&] {
      return std::string(name) + " must have shape " + shape_text(expected) + "; got " +
             shape_text(dims) + ".";
    });
  }

  template <class BufferType>
  void rank(const char* name, const BufferType& buffer, size_t rank) {
    require(buffer.dimensions().size() == rank, [&] {
      return std::string(name) + " must have rank " + std::to_string(rank) + "; got shape " +
             shape_text(buffer.dimensions()) + ".";
    });
  }

  // int sizes inside the kernels; offsets are formed in 64 bits.
  void size(const char* name, int64_t value) {
    require(value >= 1 && value <= 0x3FFFFFFF, [&] {
      return std::string(name) + " must lie in [1, 2^30 - 1]; got " + std::to_string(value) + ".";
    });
  }

  void sizes(const Sizes& s) {
    size("batch", s.batch);
    size("seqlen_q", s.seqlen_q);
    size("seqlen_k", s.seqlen_k);
    size("num_heads_q", s.num_heads_q);
    require(s.num_heads_kv >= 1 && s.num_heads_q % s.num_heads_kv == 0, [&] {
      return "num_heads_kv must divide num_heads_q; got " + std::to_string(s.num_heads_kv) +
             " and " + std::to_string(s.num_heads_q) + ".";
    });
    require(s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256, [&] {
      return "head_dim must be 64, 128 or 256; got " + std::to_string(s.head_dim) + ".";
    });
  }

  // The sizes of a call, checked, from its arrays [batch, seqlen, num_heads, head_dim]; none when one
  // of the two is no such array.
  template <class Query, class Key>
  Sizes sizes_of(const char* q_name, const Query& q, const char* k_name, const Key& k) {
    rank(q_name, q, 4);
    rank(k_name, k, 4);
    if (failed()) return {};
    const auto q_dims = q.dimensions(), k_dims = k.dimensions();
    const Sizes s{q_dims[0], q_dims[1], k_dims[1], q_dims[2], k_dims[2], q_dims[3]};
    sizes(s);
    return s;
  }

  // Shapes and element types of what the quantiser writes for the forward and for its own inverse.
  template <class Image, class Factors>
  ElementKind images(const Sizes& s, const Image& q_image, const Factors& q_descale,
                     const Image& k_image, const Factors& k_descale, const Image& v_image,
                     const Factors& v_descale, const Factors& v_mean) {
    same_type("k_image", k_image.element_type(), "q_image", q_image.element_type());
    key_images(s, k_image, k_descale, v_image, v_descale, v_mean);
    return query_image(s, q_image, q_descale);
  }

  // Of them those of queries; and those of keys and values.
  template <class Image, class Factors>
  ElementKind query_image(const Sizes& s, const Image& q_image, const Factors& q_descale) {
    const int64_t rows = round_up(s.seqlen_q, kSlab);
    shape("q_image", q_image, {s.batch, s.num_heads_q, rows, s.head_dim});
    shape("q_descale", q_descale, {s.batch, s.num_heads_q, rows});
    return kind("q_image", q_image.element_type(), true, false);
  }
  // Codes of queries with a factor for each slab, which only e4m3 at head_dim 128 has, or none. Returns
  // whether there are any.
  template <class Image, class Factors>
  bool query_codes(const Sizes& s, const Image& q_codes, const Factors& q_factor) {
    rank("q_codes", q_codes, 4);
    if (failed()) return false;
    const int64_t rows = q_codes.dimensions()[2] == 0 ? 0 : round_up(s.seqlen_q, kSlab);
    shape("q_codes", q_codes, {s.batch, s.num_heads_q, rows, s.head_dim});
    shape("q_factor", q_factor, {s.batch, s.num_heads_q, rows / kSlab});
    const ElementKind codes = kind("q_codes", q_codes.element_type(), true, false);
    require(rows == 0 || (codes == ElementKind::kE4m3 && s.head_dim == 128), [] {
      return std::string("q_codes must have no rows but for float8_e4m3fn at head_dim 128.");
    });
    return rows > 0;
  }
  template <class Image, class Factors>
  ElementKind key_images(const Sizes& s, const Image& k_image, const Factors& k_descale,
                         const Image& v_image, const Factors& v_descale, const Factors& v_mean) {
    const int64_t granules = round_up(s.seqlen_k, kGranule) / kGranule;
    shape("k_image", k_image, {s.batch, s.num_heads_kv, granules * kGranule, s.head_dim});
    shape("k_descale", k_descale, {s.batch, s.num_heads_kv, granules});
    shape("v_image", v_image, {s.batch, s.num_heads_kv, granules, s.head_dim, kGranule});
    shape("v_descale", v_descale, {s.batch, s.num_heads_kv, s.head_dim});
    shape("v_mean", v_mean, {s.batch, s.num_heads_kv, s.head_dim});
    same_type("v_image", v_image.element_type(), "k_image", k_image.element_type());
    return kind("k_image", k_image.element_type(), true, false);
  }

  // `type` of operand `name` is that of operand `like`.
  void same_type(const char* name, ffi::DataType type, const char* like, ffi::DataType expected) {
    require(type == expected, [&] {
      return std::string(name) + " must have the element type of " + like + "; got XLA types " +
             std::to_string(static_cast<int>(type)) + " and " +
             std::to_string(static_cast<int>(expected)) + ".";
    });
  }

  // Element kind of an operand; `float8` and `half` say which are allowed.
  ElementKind kind(const char* name, ffi::DataType type, bool float8, bool half) {
    switch (type) {
      case ffi::DataType::BF16:
        if (half) return ElementKind::kBf16;
        break;
      case ffi::DataType::F16:
        if (half) return ElementKind::kF16;
        break;
      case ffi::DataType::F8E4M3FN:
        if (float8) return ElementKind::kE4m3;
        break;
      case ffi::DataType::F8E5M2:
        if (float8) return ElementKind::kE5m2;
        break;
      default:
        break;
    }
    fail(ffi::ErrorCode::kInvalidArgument,
         std::string(name) + " must be " +
             (half && float8 ? "bfloat16, float16, float8_e4m3fn or float8_e5m2"
              : half         ? "bfloat16 or float16"
                             : "float8_e4m3fn or float8_e5m2") +
             "; got XLA type " + std::to_string(static_cast<int>(type)) + ".");
    return ElementKind::kBf16;
  }

  // Hopper only: sm_90a code runs on compute capability 9.0 and on nothing else.
  void hopper() {
    int capability = 0;
    const cudaError_t status = compute_capability(&capability);
    if (status != cudaSuccess) {
      fail(ffi::ErrorCode::kInternal,
           std::string("the device cannot be asked: ") + cudaGetErrorString(status) + ".");
    } else if (capability != 90) {
      fail(ffi::ErrorCode::kFailedPrecondition,
           "these kernels need a GPU of compute capability 9.0 (Hopper); got " +
               std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
               ". Pass implementation=\"xla\".");
    }
  }

  // How the launches went. CUDA keeps an error until somebody asks; here it is told, and the next
  // launch shall not be told again.
  ffi::Error launched(cudaError_t status) const {
    if (status == cudaSuccess) return ffi::Error::Success();
    cudaGetLastError();
    return ffi::Error(ffi::ErrorCode::kInternal,
                      std::string(where_) + ": launch failed: " + cudaGetErrorString(status) +
                          " (may stem from an earlier kernel on this stream).");
  }

 private:
  const char* where_;
  std::optional<ffi::Error> error_;
};

}  // namespace jax_fa3
