// The quantiser's kernels themselves, executed on the host (cuda_on_host.h), for comparison with
// the NumPy model.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>

// Before the kernels: it makes their CUDA words mean something here.
// clang-format off
#include "tests/host/cuda_on_host.h"
// clang-format on

#include "cuda/quantize/dequantize_kernels.cuh"
#include "cuda/quantize/grid.h"
#include "cuda/quantize/quantize_kernel.cuh"
#include "cuda/quantize/stats_kernels.cuh"

namespace py = pybind11;
using namespace jax_fa3;  // NOLINT

namespace {

using cuda_on_host::GuardedBuffer;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

ElementKind kind_of(const std::string& dtype) {
  if (dtype == "bfloat16") return ElementKind::kBf16;
  if (dtype == "float16") return ElementKind::kF16;
  if (dtype == "float8_e4m3fn") return ElementKind::kE4m3;
  if (dtype == "float8_e5m2") return ElementKind::kE5m2;
  throw std::invalid_argument("kind_of: dtype is none of the four element kinds; got " + dtype +
                              ".");
}

template <int kHeadDim>
void run_kernels(const QuantizeParams& params, const QuantizeGrid& grid) {
  cuda_on_host::launch(grid.stats_blocks, kStatsThreads,
                       [&] { key_value_stats<kHeadDim>(params); });
  cuda_on_host::launch(grid.finalize_blocks, grid.finalize_threads,
                       [&] { finalize_stats<kHeadDim>(params); });
  cuda_on_host::launch(grid.kv_blocks + grid.q_blocks, QuantizeTraits<kHeadDim>::kThreads, [&] {
    if (params.image_kind == ElementKind::kE5m2) {
      quantize<kHeadDim, true>(params, grid.kv_blocks);
    } else {
      quantize<kHeadDim, false>(params, grid.kv_blocks);
    }
  });
}

// q, k, v: the arrays' bytes, last axis in bytes: [batch, seqlen, heads, head_dim * itemsize].
py::dict quantize_on_host(Bytes q, Bytes k, Bytes v, const std::string& q_dtype,
                          const std::string& k_dtype, const std::string& v_dtype,
                          const std::string& image_dtype, Floats factor, Floats v_factor,
                          bool hadamard, bool smooth_key, bool center_value) {
  QuantizeParams params{};
  params.q_kind = kind_of(q_dtype), params.k_kind = kind_of(k_dtype),
  params.v_kind = kind_of(v_dtype);
  params.image_kind = kind_of(image_dtype);
  params.batch = static_cast<int>(q.shape(0));
  params.seqlen_q = static_cast<int>(q.shape(1)), params.seqlen_k = static_cast<int>(k.shape(1));
  params.num_heads_q = static_cast<int>(q.shape(2)),
  params.num_heads_kv = static_cast<int>(k.shape(2));
  params.head_dim = static_cast<int>(q.shape(3)) / element_bytes(params.q_kind);
  params.hadamard = hadamard, params.smooth_key = smooth_key, params.center_value = center_value;
  QuantizeGrid grid;
  if (!make_quantize_grid(params, &grid))
    throw std::invalid_argument("quantize_on_host: refused by the launch.");

  const auto guarded = [](const void* data, size_t bytes) {
    auto buffer = std::make_unique<GuardedBuffer>(bytes);
    memcpy(buffer->as<char>(), data, bytes);
    return buffer;
  };
  const auto q_in = guarded(q.data(), q.nbytes()), k_in = guarded(k.data(), k.nbytes());
  const auto v_in = guarded(v.data(), v.nbytes());
  const auto factor_in = guarded(factor.data(), factor.nbytes());
  const auto v_factor_in = guarded(v_factor.data(), v_factor.nbytes());
  params.q = q_in->as<void>(), params.k = k_in->as<void>(), params.v = v_in->as<void>();
  params.factor = factor_in->as<float>(), params.v_factor = v_factor_in->as<float>();

  const size_t q_heads = static_cast<size_t>(params.batch) * params.num_heads_q;
  const size_t kv_heads = static_cast<size_t>(params.batch) * params.num_heads_kv;
  const size_t rows = q_heads * round_up(params.seqlen_q, kSlab);
  const size_t keys = kv_heads * round_up(params.seqlen_k, kGranule);
  const size_t dim = params.head_dim;
  GuardedBuffer q_image(rows * dim), q_descale(rows * 4), q_shift(rows * 4);
  GuardedBuffer k_image(keys * dim), k_descale(keys / kGranule * 4), v_image(keys * dim);
  GuardedBuffer v_descale(kv_heads * dim * 4), v_mean(kv_heads * dim * 4);
  GuardedBuffer workspace(quantize_workspace_floats(params.batch, params.num_heads_kv,
                                                    params.seqlen_k, params.head_dim) *
                          4);
  params.q_image = q_image.as<uint8_t>(), params.q_descale = q_descale.as<float>();
  params.q_shift = q_shift.as<float>(), params.k_image = k_image.as<uint8_t>();
  params.k_descale = k_descale.as<float>(), params.v_image = v_image.as<uint8_t>();
  params.v_descale = v_descale.as<float>(), params.v_mean = v_mean.as<float>();
  params.workspace = workspace.as<float>();

  if (params.head_dim == 64) {
    run_kernels<64>(params, grid);
  } else if (params.head_dim == 128) {
    run_kernels<128>(params, grid);
  } else {
    run_kernels<256>(params, grid);
  }

  py::dict results;
  const auto give = [&](const char* name, const GuardedBuffer& buffer) {
    Bytes bytes(static_cast<py::ssize_t>(buffer.bytes()));
    memcpy(bytes.mutable_data(), buffer.as<char>(), buffer.bytes());
    results[name] = bytes;
  };
  give("q_image", q_image), give("q_descale", q_descale), give("q_shift", q_shift);
  give("k_image", k_image), give("k_descale", k_descale), give("v_image", v_image);
  give("v_descale", v_descale), give("v_mean", v_mean), give("workspace", workspace);
  return results;
}

// Images back to bfloat16, as bytes: rows of q or k, or the granules of v.
Bytes dequantize_rows_on_host(Bytes image, Floats descale, int rows_per_descale, int group_rows,
                              const std::string& image_dtype, int batch, int seqlen, int heads,
                              int head_dim) {
  const int rows =
      static_cast<int>(image.nbytes() / (static_cast<int64_t>(batch) * heads) / head_dim);
  const int64_t chunks = static_cast<int64_t>(batch) * seqlen * heads * (head_dim / 16);
  GuardedBuffer out(chunks * 32);
  cuda_on_host::launch((chunks + kDequantizeThreads - 1) / kDequantizeThreads, kDequantizeThreads,
                       [&] {
                         dequantize_rows_kernel(image.data(), descale.data(), rows_per_descale,
                                                group_rows, kind_of(image_dtype), chunks, seqlen,
                                                rows, heads, head_dim, out.as<uint4>());
                       });
  Bytes bytes(static_cast<py::ssize_t>(out.bytes()));
  memcpy(bytes.mutable_data(), out.as<char>(), out.bytes());
  return bytes;
}

Bytes dequantize_values_on_host(Bytes image, Floats descale, Floats mean,
                                const std::string& image_dtype, int batch, int seqlen, int heads,
                                int head_dim) {
  const int granules = static_cast<int>(round_up(seqlen, kGranule) / kGranule);
  GuardedBuffer out(static_cast<int64_t>(batch) * seqlen * heads * head_dim * 2);
  cuda_on_host::launch(batch * heads * granules, kGranule, [&] {
    dequantize_values_kernel(image.data(), descale.data(), mean.data(), kind_of(image_dtype),
                             seqlen, granules, heads, head_dim, out.as<uint2>());
  });
  Bytes bytes(static_cast<py::ssize_t>(out.bytes()));
  memcpy(bytes.mutable_data(), out.as<char>(), out.bytes());
  return bytes;
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_on_host", &quantize_on_host);
  module.def("dequantize_rows_on_host", &dequantize_rows_on_host);
  module.def("dequantize_values_on_host", &dequantize_values_on_host);
  module.def("value_smem_offset", py::vectorize([](int head_dim, int key, int channel) {
               return head_dim == 64 ? QuantizeTraits<64>::value_smem_offset(key, channel)
                                     : QuantizeTraits<128>::value_smem_offset(key, channel);
             }));
}
