// The compile-time side of a schedule: element type and tile shape, and what follows from them.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <type_traits>

#include "kernels/tile_order.cuh"
#include "launch/trace.h"
#include "peer/control_block.h"

namespace entwine {

// 128x256: both math warpgroups work on one tile (one team). 128x128: each takes every other tile,
// so that the epilogue of one runs under the mainloop of the other (two teams). Either way a thread
// of a math warpgroup holds 128 float32 accumulators.
//
// kWTransposed: w is given as [n, k] and multiplied as its transpose.
// kTraced: every warp records what it does when (kernels/trace.cuh).
template <class Element_, int kTileN_, int kNumStages_, bool kWTransposed_, bool kTraced_>
struct KernelConfig {
  using Element = Element_;
  static constexpr bool kWTransposed = kWTransposed_, kTraced = kTraced_;
  static constexpr int kTileM = 128, kTileN = kTileN_, kTileK = 64;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumTeams = kTileN == 256 ? 1 : 2;
  static constexpr int kNumThreads = 384, kNumMathThreads = 256;
  static constexpr int kTeamThreads = kNumMathThreads / kNumTeams;
  static constexpr int kNumAccumulators = 128;

  // What setmaxnreg moves from the auxiliary warpgroup to the math warpgroups: 128 * 104 + 256 * 192
  // stays under 384 * 168, what the launch gave out.
  static constexpr int kAuxiliaryRegisters = 104, kMathRegisters = 192;

  // A tile in a store buffer or a slot is a row of panels of 64 columns; a row of a panel is 128
  // bytes, its eight 16-byte chunks permuted by XOR with the row, so that neither the epilogue's
  // stmatrix nor a warp that reads rows meets a bank twice.
  static constexpr int kPanelColumns = 64, kPanelRowBytes = 128, kChunkBytes = 16;
  static constexpr int kPanelBytes = kTileM * kPanelRowBytes;
  static constexpr int kNumPanels = kTileN / kPanelColumns;
  static constexpr int kTileBytes = kNumPanels * kPanelBytes;
  static constexpr int kChunkElements = kChunkBytes / sizeof(Element);
  static constexpr int kChunksPerRow = kTileN / kChunkElements;

  // What a reducing warp takes at a time: whole rows of a tile, 4 KB of each source.
  static constexpr int kUnitBytes = 4096;
  static constexpr int kUnitRows = kUnitBytes / (kTileN * static_cast<int>(sizeof(Element)));
  static constexpr int kUnitsPerTile = kTileM / kUnitRows;

  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using MathSchedule =
      std::conditional_t<kNumTeams == 1, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kChunkElements, Element,
      std::conditional_t<kWTransposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
      kChunkElements, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<kNumStages>, MathSchedule>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
};

// Where the 16-byte chunk `chunk` of a tile's row `row` lies in a store buffer or slot.
template <class Config>
ENTWINE_HOST_DEVICE int chunk_offset(int row, int chunk) {
  return (chunk >> 3) * Config::kPanelBytes + row * Config::kPanelRowBytes +
         (((chunk & 7) ^ (row & 7)) << 4);
}

template <class Config>
struct FusedParams {
  typename Config::Mainloop::Params mainloop;
  // AllGather: the operands with this rank's own x in the place of the gathered one, which the mainloop
  // reads, and where finished tiles are stored: [num_batches * num_ranks, block_rows, n].
  typename Config::Mainloop::Params mainloop_own;
  CUtensorMap output_map;
  PeerWindow window;
  Op op;
  const void* x;        // AllGather: this rank's rows, to be sent
  void* shared_output;  // what peers store to: the output (AllReduce), the gathered x (AllGather)
  void* output;
  RowBlocks blocks;
  int m, n, k;  // of the product on this rank
  int num_tiles, num_tiles_n, num_k_tiles;
  int raster;
  int num_comm_ctas;
  int num_spare_warps;
  int push_spread;
  TraceBuffer trace;
};

template <class Config>
__device__ __forceinline__ TilePlace place_of(const FusedParams<Config>& params, int tile_idx) {
  const PeerWindow& window = params.window;
  switch (params.op) {
    case Op::kAllReduce:
      return allreduce_place(tile_idx, params.num_tiles_n, params.raster, window.num_ranks,
                             params.blocks, Config::kTileM);
    case Op::kReduceScatter:
      return reducescatter_place(tile_idx, params.num_tiles_n, params.raster, window.num_ranks,
                                 params.blocks, Config::kTileM);
    default:
      return allgather_place(tile_idx, params.num_tiles_n, params.raster, window.num_ranks,
                             window.rank, params.blocks, Config::kTileM);
  }
}

}  // namespace entwine
