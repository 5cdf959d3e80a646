// The compile-time side of a schedule: element type and tile shape, and what follows from them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <type_traits>

#include "kernels/tile_order.cuh"
#include "peer/control_block.h"

namespace entwine {

// 128x256: both math warpgroups work on one tile (one team). 128x128: each takes every other tile,
// so that the epilogue of one runs under the mainloop of the other (two teams). Either way a thread
// of a math warpgroup holds 128 float32 accumulators.
template <class Element_, int kTileN_, int kNumStages_>
struct KernelConfig {
  using Element = Element_;
  static constexpr int kTileM = 128, kTileN = kTileN_, kTileK = 64;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumTeams = kTileN == 256 ? 1 : 2;
  static constexpr int kNumThreads = 384, kNumMathThreads = 256;
  static constexpr int kTeamThreads = kNumMathThreads / kNumTeams;
  static constexpr int kNumAccumulators = 128;

  // What setmaxnreg moves from the auxiliary warpgroup to the math warpgroups: 128 * 96 + 256 * 200
  // stays under 384 * 168, what the launch gave out.
  static constexpr int kAuxiliaryRegisters = 96, kMathRegisters = 200;

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
      kChunkElements, Element, cutlass::layout::RowMajor, kChunkElements, float, TileShape,
      ClusterShape, cutlass::gemm::collective::StageCount<kNumStages>, MathSchedule>::CollectiveOp;
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
  PeerWindow window;
  void* output;
  int m, n, k;  // k of this rank
  int num_tiles_m, num_tiles_n, num_k_tiles;
  int raster;
  int num_comm_ctas;
  int num_spare_warps;
  int push_spread;
};

}  // namespace entwine
