// The quantiser's kernels themselves, executed on the host (cuda_on_host.h), for comparison with
// the NumPy model.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

// Before the kernels: it makes their CUDA words mean something here.
// clang-format off
#include "tests/host/cuda_on_host.h"
// clang-format on

#include "cuda/quantize/dequantize_kernels.cuh"
#include "cuda/quantize/grid.h"
#include "cuda/quantize/quantize_kernel.cuh"
#include "cuda/quantize/stats_kernels.cuh"
#include "cuda/quantize/unrotate_kernel.cuh"

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

// The CTAs of a launch that have tiles of q, or the others.
template <int kHeadDim, QuantizeStep kStep>
void run_step(const QuantizeParams& params, const QuantizeGrid& grid, bool of_q) {
  cuda_on_host::launch(grid.blocks(kStep), QuantizeTraits<kHeadDim>::kThreads, [&] {
    if ((static_cast<int>(blockIdx.x) >= grid.own_blocks(kStep)) != of_q) return;
    if (params.image_kind == ElementKind::kE5m2) {
      quantize<kHeadDim, true, false, kStep>(params, grid);
    } else if (!is_all_bf16(params)) {
      quantize<kHeadDim, false, false, kStep>(params, grid);
    } else {
      quantize<kHeadDim, false, true, kStep>(params, grid);
    }
  });
}

template <int kHeadDim>
void run_kernels(const QuantizeParams& params, const QuantizeGrid& grid) {
  // They wait for nothing, so they may be first.
  const bool q_first = spreads_q(params);
  if (q_first) run_step<kHeadDim, QuantizeStep::kMeans>(params, grid, true);
  cuda_on_host::launch(grid.stats_blocks, kStatsThreads, [&] {
    if (!is_all_bf16(params)) {
      key_value_stats<kHeadDim, false, false>(params);
    } else if (key_sample(params.seqlen_k) == 1) {
      key_value_stats<kHeadDim, true, false>(params);
    } else {
      key_value_stats<kHeadDim, true, true>(params);
    }
  });
  run_step<kHeadDim, QuantizeStep::kMeans>(params, grid, false);
  if (!q_first) run_step<kHeadDim, QuantizeStep::kMeans>(params, grid, true);
  for (const bool of_q : {true, false})
    run_step<kHeadDim, QuantizeStep::kKeysAndValues>(params, grid, of_q);
  if (!has_value_steps(params)) return;
  for (const bool of_q : {true, false}) run_step<kHeadDim, QuantizeStep::kEnds>(params, grid, of_q);
}

// q, k, v: the arrays' bytes, last axis in bytes: [batch, seqlen, heads, head_dim * itemsize]. q_run: tiles of
// q in a block, and a third of the blocks late; 0 for what the launch chooses.
py::dict quantize_on_host(Bytes q, Bytes k, Bytes v, const std::string& q_dtype,
                          const std::string& k_dtype, const std::string& v_dtype,
                          const std::string& image_dtype, Floats factor, Floats v_factor,
                          bool hadamard, bool smooth_key, bool center_value, bool wants_shift,
                          int q_run) {
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
  params.wants_shift = wants_shift;
  QuantizeGrid grid;
  if (!make_quantize_grid(params, &grid))
    throw std::invalid_argument("quantize_on_host: refused by the launch.");
  if (q_run != 0) {
    deal_q_tiles(params, q_run, 0, &grid);
    deal_q_tiles(params, q_run, grid.q_blocks / 3, &grid);
  }

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
  params.one_factor = factor.ndim() == 0, params.one_v_factor = v_factor.ndim() == 0;

  const size_t q_heads = static_cast<size_t>(params.batch) * params.num_heads_q;
  const size_t kv_heads = static_cast<size_t>(params.batch) * params.num_heads_kv;
  const size_t rows = q_heads * round_up(params.seqlen_q, kSlab);
  const size_t keys = kv_heads * round_up(params.seqlen_k, kGranule);
  const size_t dim = params.head_dim;
  GuardedBuffer q_image(rows * dim), q_descale(rows * 4), q_shift(rows * 4);
  GuardedBuffer k_image(keys * dim), k_descale(keys / kGranule * 4), v_image(keys * dim);
  GuardedBuffer v_descale(kv_heads * dim * 4), v_mean(kv_heads * dim * 4);
  GuardedBuffer tile_counter(4);
  GuardedBuffer workspace(kv_heads * (quantize_chunks(params.seqlen_k) + 1) * 4 * dim * 4);
  params.q_image = q_image.as<uint8_t>(), params.q_descale = q_descale.as<float>();
  params.q_shift = q_shift.as<float>(), params.k_image = k_image.as<uint8_t>();
  params.k_descale = k_descale.as<float>(), params.v_image = v_image.as<uint8_t>();
  params.v_descale = v_descale.as<float>(), params.v_mean = v_mean.as<float>();
  params.workspace = workspace.as<float>(), params.tile_counter = tile_counter.as<int>();

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
  give("tile_counter", tile_counter);
  return results;
}

// Images back to bfloat16, as bytes: {"q": ..., "k": ..., "v": ...}. `images`: what quantize_on_host
// returned.
py::dict dequantize_on_host(py::dict images, const std::string& image_dtype, int batch,
                            int seqlen_q, int seqlen_k, int num_heads_q, int num_heads_kv,
                            int head_dim) {
  DequantizeParams params{};
  const auto bytes_of = [&](const char* name) { return images[name].cast<Bytes>().data(); };
  const auto floats_of = [&](const char* name) {
    return reinterpret_cast<const float*>(bytes_of(name));
  };
  params.q_image = bytes_of("q_image"), params.q_descale = floats_of("q_descale");
  params.k_image = bytes_of("k_image"), params.k_descale = floats_of("k_descale");
  params.v_image = bytes_of("v_image"), params.v_descale = floats_of("v_descale");
  params.v_mean = floats_of("v_mean");
  params.image_kind = kind_of(image_dtype), params.batch = batch, params.head_dim = head_dim;
  params.seqlen_q = seqlen_q, params.seqlen_k = seqlen_k;
  params.num_heads_q = num_heads_q, params.num_heads_kv = num_heads_kv;
  const int64_t keys = static_cast<int64_t>(batch) * seqlen_k * num_heads_kv * head_dim;
  GuardedBuffer q(static_cast<int64_t>(batch) * seqlen_q * num_heads_q * head_dim * 2);
  GuardedBuffer k(keys * 2), v(keys * 2);
  params.q = q.as<void>(), params.k = k.as<void>(), params.v = v.as<void>();
  const DequantizeGrid grid(params);
  cuda_on_host::launch(grid.q_blocks + 2 * grid.k_blocks, kDequantizeThreads, [&] {
    head_dim == 64    ? dequantize<64>(params, grid)
    : head_dim == 128 ? dequantize<128>(params, grid)
                      : dequantize<256>(params, grid);
  });
  py::dict results;
  for (const auto& [name, buffer] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    Bytes bytes(static_cast<py::ssize_t>(buffer->bytes()));
    memcpy(bytes.mutable_data(), buffer->as<char>(), buffer->bytes());
    results[name] = bytes;
  }
  return results;
}

// Gradients, bfloat16 as bytes, through unrotate: {"dq": ..., "dk": ...}.
py::dict unrotate_on_host(Bytes dq, Bytes dk, float scale, Floats k_mean, Floats row_sums,
                          int head_dim) {
  UnrotateParams params{};
  params.batch = static_cast<int>(dq.shape(0));
  params.seqlen_q = static_cast<int>(dq.shape(1)), params.seqlen_k = static_cast<int>(dk.shape(1));
  params.num_heads_q = static_cast<int>(dq.shape(2));
  params.num_heads_kv = static_cast<int>(dk.shape(2));
  params.head_dim = head_dim, params.out_kind = ElementKind::kBf16, params.scale = &scale;
  params.dq = dq.data(), params.dk = dk.data();
  params.k_mean = k_mean.size() > 0 ? k_mean.data() : nullptr;
  params.row_sums = row_sums.data();
  GuardedBuffer dq_out(dq.nbytes()), dk_out(dk.nbytes());
  params.dq_out = dq_out.as<void>(), params.dk_out = dk_out.as<void>();
  const UnrotateGrid grid(params);
  cuda_on_host::launch(grid.q_blocks + grid.k_blocks, kUnrotateThreads, [&] {
    head_dim == 64    ? unrotate<64>(params, grid)
    : head_dim == 128 ? unrotate<128>(params, grid)
                      : unrotate<256>(params, grid);
  });
  py::dict results;
  for (const auto& [name, buffer] : {std::pair{"dq", &dq_out}, std::pair{"dk", &dk_out}}) {
    Bytes bytes(static_cast<py::ssize_t>(buffer->bytes()));
    memcpy(bytes.mutable_data(), buffer->as<char>(), buffer->bytes());
    results[name] = bytes;
  }
  return results;
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_on_host", &quantize_on_host);
  module.def("dequantize_on_host", &dequantize_on_host);
  module.def("unrotate_on_host", &unrotate_on_host);
}
