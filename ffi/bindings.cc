// The Python module entwine_jax._ffi: names -> functions and handlers, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>

#include "cuda_bindings.h"
#include "kernels/tile_order.cuh"

namespace nb = nanobind;

NB_MODULE(_ffi, m) {
  m.doc() = "Compiled part of entwine_jax.";

  // The tile order, as the kernels have it.
  m.def(
      "tile_coordinates",
      [](int tile_idx, int num_tiles_m, int num_tiles_n, int raster) {
        const auto at = entwine::tile_coordinates(
            tile_idx, entwine::make_raster(num_tiles_m, num_tiles_n, raster));
        return std::tuple(at.tile_m_idx, at.tile_n_idx);
      },
      nb::arg("tile_idx"), nb::arg("num_tiles_m"), nb::arg("num_tiles_n"), nb::arg("raster"));
  m.def(
      "tile_item",
      [](int item_idx, int num_tiles, int narrow_tail) {
        const auto item =
            entwine::tile_item(item_idx, entwine::split_tiles(num_tiles, narrow_tail));
        return std::tuple(item.tile_idx, item.half, item.narrow);
      },
      nb::arg("item_idx"), nb::arg("num_tiles"), nb::arg("narrow_tail"),
      "(tile_idx, half, whether it is but a half)");
  m.def(
      "reducescatter_turn",
      [](int item_idx, int items_per_owner, int num_ranks, int rank, int own_last) {
        const auto turn = entwine::reducescatter_turn(
            item_idx, items_per_owner, entwine::make_divisor(num_ranks),
            entwine::make_divisor(std::max(num_ranks - 1, 1)), rank, own_last);
        return std::tuple(turn.owner, turn.item_idx);
      },
      nb::arg("item_idx"), nb::arg("items_per_owner"), nb::arg("num_ranks"), nb::arg("rank"),
      nb::arg("own_last"), "(owner, position among the owner's items)");
  m.def(
      "tile_owner",
      [](int tile_idx, int num_ranks) {
        return entwine::tile_owner(tile_idx, entwine::make_divisor(num_ranks));
      },
      nb::arg("tile_idx"), nb::arg("num_ranks"));
  m.def(
      "tile_slot",
      [](int tile_idx, int num_ranks) {
        return entwine::tile_slot(tile_idx, entwine::make_divisor(num_ranks));
      },
      nb::arg("tile_idx"), nb::arg("num_ranks"));
  m.def("owned_tile", &entwine::owned_tile, nb::arg("slot"), nb::arg("num_ranks"), nb::arg("rank"));
  m.def("num_owned_tiles", &entwine::num_owned_tiles, nb::arg("num_tiles"), nb::arg("num_ranks"),
        nb::arg("rank"));
  m.def(
      "reducescatter_place",
      [](int owner, int slot, int num_tiles_n, int raster, int num_ranks, int num_batches,
         int block_rows, int tile_m) {
        const auto order = entwine::make_tile_order({num_batches, block_rows, block_rows},
                                                    num_tiles_n, raster, num_ranks, tile_m);
        const auto p = entwine::reducescatter_place(owner, slot, order);
        return std::tuple(p.x_row, p.output_row, p.rows, p.tile_n_idx);
      },
      nb::arg("owner"), nb::arg("slot"), nb::arg("num_tiles_n"), nb::arg("raster"),
      nb::arg("num_ranks"), nb::arg("num_batches"), nb::arg("block_rows"), nb::arg("tile_m"),
      "(row of x, row of y, valid rows, tile_n_idx)");
  m.def(
      "allgather_place",
      [](int tile_idx, int num_tiles_n, int raster, int num_ranks, int rank, int num_batches,
         int block_rows, int tile_m) {
        const auto order = entwine::make_tile_order({num_batches, block_rows, block_rows},
                                                    num_tiles_n, raster, num_ranks, tile_m);
        const auto p = entwine::allgather_place(tile_idx, order, rank);
        return std::tuple(p.source, p.tile_row, p.shard_row, p.output_row, p.rows, p.tile_n_idx);
      },
      nb::arg("tile_idx"), nb::arg("num_tiles_n"), nb::arg("raster"), nb::arg("num_ranks"),
      nb::arg("rank"), nb::arg("num_batches"), nb::arg("block_rows"), nb::arg("tile_m"),
      "(source, tile row, row of the shard, row of y, valid rows, tile_n_idx)");

  m.def(
      "build_info",
      [] {
        nb::dict info;
        info["version"] = ENTWINE_VERSION;
        info["jaxlib_headers"] = ENTWINE_JAXLIB_VERSION;
#ifdef ENTWINE_CUDA
        info["cuda"] = true;
        info["nvcc"] = ENTWINE_NVCC_VERSION;
#else
        info["cuda"] = false;
        info["nvcc"] = "";
#endif
        return info;
      },
      nb::sig("def build_info() -> dict[str, object]"),
      "What was built: version, whether the CUDA part is there, its compiler, jaxlib's headers.");

#ifdef ENTWINE_CUDA
  entwine::bind_cuda(m);
#endif
}
