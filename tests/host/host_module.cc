// Test-only extension: the functions of cuda/common and cuda/quantize that also run on the host,
// over NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "cuda/common/heads_ahead.h"
#include "cuda/common/layout.h"
#include "cuda/common/mask.h"
#include "cuda/common/scheduler.h"
#include "cuda/quantize/grid.h"
#include "cuda/quantize/launch.h"
#include "cuda/quantize/numerics.h"
#include "cuda/quantize/rotation.h"

namespace py = pybind11;
using namespace jax_fa3;  // NOLINT: the module is a list of names

void bind_quantize(py::module_& module);  // host_quantize.cc
void bind_graphs(py::module_& module);    // host_graphs.cc

namespace {

void bind_layout(py::module_& m) {
  m.attr("granule") = kGranule;
  m.attr("slab") = kSlab;
  m.def("operand_range", py::vectorize([](int head_dim) { return operand_range(head_dim); }));
  m.def("round_up",
        py::vectorize([](int64_t value, int64_t multiple) { return round_up(value, multiple); }));
  m.def("swizzled_chunk", py::vectorize([](int row_bytes, int row, int chunk) {
          return swizzled_chunk(row_bytes, row, chunk);
        }));
  m.def("row_image_offset",
        py::vectorize([](int head_dim, int group_rows, int64_t row, int column) {
          return row_image_offset(head_dim, group_rows, row, column);
        }));
  m.def("key_position", py::vectorize([](int key) { return key_position(key); }));
  m.def("value_image_offset",
        py::vectorize([](int channel, int key) { return value_image_offset(channel, key); }));
}

void bind_mask(py::module_& m) {
  m.def("visible", py::vectorize([](int seqlen_k, bool is_causal, int diagonal, int row) {
          return KeyRange{seqlen_k, is_causal, diagonal}.visible(row);
        }));
  m.def("num_blocks",
        py::vectorize([](int seqlen_k, bool is_causal, int diagonal, int last_row, int block_kv) {
          return KeyRange{seqlen_k, is_causal, diagonal}.num_blocks(last_row, block_kv);
        }));
  m.def("needs_mask", py::vectorize([](int seqlen_k, bool is_causal, int diagonal, int first_row,
                                       int block, int block_kv) {
          return KeyRange{seqlen_k, is_causal, diagonal}.needs_mask(first_row, block, block_kv);
        }));
}

void bind_scheduler(py::module_& m) {
  m.def("num_tiles",
        [](int num_q_blocks, int num_heads, int batch, int section, bool longest_first) {
          return TileOrder{num_q_blocks, num_heads, batch, section, longest_first}.num_tiles();
        });
  m.def("tile", [](int num_q_blocks, int num_heads, int batch, int section, bool longest_first,
                   int index) {
    const Tile tile = TileOrder{num_q_blocks, num_heads, batch, section, longest_first}.tile(index);
    return py::make_tuple(tile.q_block, tile.head, tile.batch);
  });
  m.def("heads_ahead", [](int num_q_blocks, int num_heads, int batch, int section,
                          bool longest_first, int fewest_tiles) {
    const HeadsAhead ahead = heads_ahead(
        TileOrder{num_q_blocks, num_heads, batch, section, longest_first}, fewest_tiles);
    return py::make_tuple(ahead.distance, ahead.first);
  });
  m.def("pairing",
        [](int num_q_blocks, int group_size, int seqlen_k, bool is_causal) -> const char* {
          switch (choose_pairing(num_q_blocks, group_size, seqlen_k, is_causal)) {
            case Pairing::kNeighbours:
              return "neighbours";
            case Pairing::kHalves:
              return "halves";
            default:
              return "none";
          }
        });
  m.def("half_tile",
        [](int num_q_blocks, int num_heads, int batch, int section, bool longest_first, int index) {
          const Tile tile =
              half_tile(TileOrder{num_q_blocks, num_heads, batch, section, longest_first}, index);
          return py::make_tuple(tile.q_block, tile.head, tile.batch);
        });
  m.def("section_bytes",
        [](int head_dim, int seqlen_k) { return section_bytes(head_dim, seqlen_k); });
  m.def("section_heads",
        [](int total_heads, int group_size, int64_t kv_bytes, int64_t cache_bytes) {
          return section_heads(total_heads, group_size, kv_bytes, cache_bytes);
        });
  m.def("section_heads_by_tiles",
        [](int total_heads, int tiles) { return section_heads_by_tiles(total_heads, tiles); });
}

void bind_numerics(py::module_& m) {
  m.def("operand_exponent",
        py::vectorize([](float amax, int head_dim) { return operand_exponent(amax, head_dim); }));
  m.def("value_exponent",
        py::vectorize([](float amax, bool e5m2) { return value_exponent(amax, e5m2); }));
  m.def("power_of_two", py::vectorize([](int exponent) { return power_of_two(exponent); }));
  m.def("value_descale", py::vectorize([](float amax, bool v_is_float8, float v_factor, bool e5m2) {
          return value_scale(amax, v_is_float8, v_factor, e5m2).descale;
        }));
  m.def("value_multiplier",
        py::vectorize([](float amax, bool v_is_float8, float v_factor, bool e5m2) {
          return value_scale(amax, v_is_float8, v_factor, e5m2).multiplier;
        }));
  m.def("cast_code", py::vectorize([](float value, bool e5m2) {
          return e5m2 ? cast_four<true>(value, 0, 0, 0) & 0xffu
                      : cast_four<false>(value, 0, 0, 0) & 0xffu;
        }));
  m.def("widen_code", py::vectorize([](uint32_t code, bool e5m2) {
          return pair_low(widen_pair(code, e5m2 ? ElementKind::kE5m2 : ElementKind::kE4m3), false);
        }));
  m.def("pair_value", py::vectorize([](uint32_t pair, bool high, bool is_bf16) {
          return high ? pair_high(pair, is_bf16) : pair_low(pair, is_bf16);
        }));
  m.def("pair_has_nonfinite", py::vectorize([](uint32_t pair, bool is_bf16) {
          const uint32_t pairs[1] = {pair};
          return has_nonfinite(pairs, is_bf16);
        }));
  m.def("is_negated", py::vectorize([](int column) { return is_negated(column); }));
  m.def("with_signs", py::vectorize([](uint32_t pair, int column) {
          return with_signs(pair, chunk_signs(column / 8), column % 8 / 2);
        }));
  m.def("image_position", py::vectorize([](int i) { return image_position(i); }));
}

void bind_grid(py::module_& m) {
  m.def("quantize_chunks", &quantize_chunks);
  // Blocks of the statistics, heads, k and v, and q, how many of the last are early and late; or None when the
  // launch refuses.
  m.def("quantize_grid",
        [](int batch, int seqlen_q, int seqlen_k, int num_heads_q, int num_heads_kv, int head_dim,
           bool hadamard, bool q_is_float8, bool wants_shift) -> py::object {
          QuantizeParams params{};
          params.q_kind = q_is_float8 ? ElementKind::kE4m3 : ElementKind::kBf16;
          params.k_kind = params.v_kind = ElementKind::kBf16;
          params.image_kind = ElementKind::kE4m3;
          params.batch = batch, params.seqlen_q = seqlen_q, params.seqlen_k = seqlen_k;
          params.num_heads_q = num_heads_q, params.num_heads_kv = num_heads_kv,
          params.head_dim = head_dim;
          params.hadamard = hadamard, params.smooth_key = params.center_value = true,
          params.wants_shift = wants_shift;
          QuantizeGrid grid;
          if (!make_quantize_grid(params, &grid)) return py::none();
          return py::make_tuple(grid.stats_blocks, grid.head_blocks, grid.kv_blocks, grid.q_blocks,
                                grid.q_early, grid.q_late);
        });
}

}  // namespace

PYBIND11_MODULE(host_module, m) {
  m.doc() = "Host side of jax_fa3's CUDA headers, for tests.";
  bind_layout(m);
  bind_mask(m);
  bind_scheduler(m);
  bind_numerics(m);
  bind_grid(m);
  bind_quantize(m);
  bind_graphs(m);
}
