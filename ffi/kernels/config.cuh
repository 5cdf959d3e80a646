// The compile-time side of a kernel: element type, tile shapes, and what follows from them.
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

constexpr int kTileM = 128;
constexpr int kNumThreads = 384, kNumMathThreads = 256, kNumMathWarps = kNumMathThreads / 32;
constexpr int kRowsPerMathWarp = kTileM / kNumMathWarps;

// A tile in the store buffer or a slot is a row of panels of 64 columns; a row of a panel is 128
// bytes, its eight 16-byte chunks permuted by XOR with the row, so that neither the epilogue's
// stmatrix nor a warp that reads rows meets a bank twice.
constexpr int kPanelColumns = 64, kPanelRowBytes = 128, kChunkBytes = 16;
constexpr int kPanelBytes = kTileM * kPanelRowBytes;
constexpr int kChunkElements = kChunkBytes / 2;  // of 16 bits

// Where the 16-byte chunk `chunk` of a tile's row `row` lies in the store buffer or a slot.
ENTWINE_HOST_DEVICE int chunk_offset(int row, int chunk) {
  return (chunk >> 3) * kPanelBytes + row * kPanelRowBytes + (((chunk & 7) ^ (row & 7)) << 4);
}

// A tile of 256 or of 128 columns, multiplied by both math warpgroups together.
template <class Element, int kTileN_, int kNumStages, bool kWTransposed>
struct TileConfig {
  static constexpr int kTileN = kTileN_;
  static constexpr int kNumPanels = kTileN / kPanelColumns;
  static constexpr int kTileBytes = kNumPanels * kPanelBytes;
  static constexpr int kChunksPerRow = kTileN / kChunkElements;
  static constexpr int kNumAccumulators = kTileM * kTileN / kNumMathThreads;

  // What a reducing warp takes at a time: whole rows of a tile, 4 KB of each source.
  static constexpr int kUnitBytes = 4096;
  static constexpr int kUnitRows = kUnitBytes / (kChunksPerRow * kChunkBytes);
  static constexpr int kUnitsPerTile = kTileM / kUnitRows;

  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kChunkElements, Element,
      std::conditional_t<kWTransposed, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
      kChunkElements, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<kNumStages>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
  using Pipeline = typename Mainloop::MainloopPipeline;
};

// kWTransposed: w is given as [n, k] and multiplied as its transpose.
// kTraced: every warp records what it does, and when (kernels/trace.cuh).
template <class Element_, Op kOp_, bool kWTransposed_, bool kTraced_>
struct KernelConfig {
  using Element = Element_;
  static constexpr Op kOp = kOp_;
  static constexpr bool kWTransposed = kWTransposed_, kTraced = kTraced_;
  using Wide = TileConfig<Element, 256, /*kNumStages=*/3, kWTransposed>;
  using Narrow = TileConfig<Element, 128, /*kNumStages=*/5, kWTransposed>;

  // What setmaxnreg moves from the auxiliary warpgroup to the math warpgroups: 128 * 104 + 256 * 192
  // stays under 384 * 168, what the launch gave out.
  static constexpr int kAuxiliaryRegisters = 104, kMathRegisters = 192;
};

// This rank's own items, in the order of their slots: first whole tiles, then halves. Those from
// `num_sent` on are of the last wave: each is summed where it was made.
struct OwnSlots {
  int num_whole, num_sent;
};

template <class Config>
struct FusedParams {
  // Of w.
  typename Config::Wide::Mainloop::Params wide;
  typename Config::Narrow::Mainloop::Params narrow;
  // Their boxes have the most rows that a tile can have. AllGather: the gathered x, and this rank's own x.
  CUtensorMap x_map, own_x_map;
  // AllGather: where finished tiles are stored: [num_batches * num_ranks, block_rows, n].
  CUtensorMap output_map;
  PeerWindow window;
  const void* x;        // AllGather: this rank's rows, to be sent
  void* shared_output;  // what peers store to: the output (AllReduce), the gathered x (AllGather)
  void* output;
  TileOrder order;
  Divisor block_rows;  // AllGather
  int n, k;            // of the product on this rank
  int tile_n;       // of the tiles that are split into items: 256, or 128 and all items are narrow
  TileItems items;  // of all tiles (AllReduce, AllGather), of the tiles of an owner (ReduceScatter)
  OwnSlots slots;
  int num_items, num_units;  // on this rank; in the whole output (AllReduce)
  Divisor split_k;           // every item in so many, one for each part of k
  int num_sources;           // of partials: every part of k of every rank
  int slots_per_source, slot_bytes;
  int own_last;     // ReduceScatter: so many of this rank's own items come last
  int x_box_bytes;  // of a k tile
  int num_k_tiles;  // of an item
  int num_comm_ctas, num_senders;
  int num_spare_warps;
  int push_spread;
  Divisor num_turns;  // of the pushes: one for each slot of an owner that a wave of items fills
  TraceBuffer trace;
};

// An item of a tile: which columns of it.
template <class Config>
__device__ __forceinline__ TilePlace take_half(const FusedParams<Config>& params, TilePlace place,
                                               const TileItem& item) {
  place.narrow = item.narrow || params.tile_n == Config::Narrow::kTileN;
  place.first_column = place.tile_n_idx * params.tile_n + item.half * Config::Narrow::kTileN;
  return place;
}

// ReduceScatter: an item of an owner.
template <class Config>
__device__ __forceinline__ TilePlace owners_place(const FusedParams<Config>& params, int owner,
                                                  int slot) {
  const TileItem item = tile_item(slot, params.items);
  TilePlace place = reducescatter_place(owner, item.tile_idx, params.order);
  place.slot = slot;
  return take_half(params, place, item);
}

// The item that comes at position `item_idx` on this rank, were k not split.
template <class Config>
__device__ __forceinline__ TilePlace whole_place(const FusedParams<Config>& params, int item_idx) {
  const int rank = params.window.rank;
  const TileOrder& order = params.order;
  if constexpr (Config::kOp == Op::kReduceScatter) {
    const OwnersItem turn = reducescatter_turn(item_idx, params.slots_per_source, order.num_ranks,
                                               order.num_others, rank, params.own_last);
    return owners_place(params, turn.owner, turn.item_idx);
  }
  const TileItem item = tile_item(item_idx, params.items);
  if constexpr (Config::kOp == Op::kAllGather) {
    return take_half(params, allgather_place(item.tile_idx, order, rank), item);
  }
  TilePlace place = allreduce_place(item.tile_idx, order);
  place.owner = tile_owner(item_idx, order.num_ranks);
  place.slot = tile_slot(item_idx, order.num_ranks);
  return take_half(params, place, item);
}

// The item that comes at position `item_idx` on this rank: the parts of k follow each other.
template <class Config>
__device__ __forceinline__ TilePlace place_of(const FusedParams<Config>& params, int item_idx) {
  if constexpr (Config::kOp == Op::kAllGather) return whole_place(params, item_idx);
  const int whole = item_idx / params.split_k;
  TilePlace place = whole_place(params, whole);
  place.k_part = item_idx - whole * params.split_k.value;
  return place;
}

// The position of a rank's partial of one part of k among all partials of an item. Whatever split_k is from
// call to call, a position belongs to one rank: a flag there that is ahead of its reader's epoch was set by
// the rank that the reader waits for.
template <class Config>
__device__ __forceinline__ int source_of(const FusedParams<Config>& params, int rank, int k_part) {
  return k_part * params.window.num_ranks + rank;
}

// Whether the CTA that makes an item also sums it: it makes the last of this rank's partials.
template <class Config>
__device__ __forceinline__ bool sums_itself(const FusedParams<Config>& params,
                                            const TilePlace& place) {
  return Config::kOp != Op::kAllGather && place.owner == params.window.rank &&
         place.slot >= params.slots.num_sent && place.k_part == params.split_k.value - 1;
}

// The item of this rank in one of its slots.
template <class Config>
__device__ __forceinline__ TilePlace place_of_slot(const FusedParams<Config>& params, int slot) {
  const int rank = params.window.rank;
  if constexpr (Config::kOp == Op::kReduceScatter) return owners_place(params, rank, slot);
  return whole_place(params, owned_tile(slot, params.window.num_ranks, rank));
}

}  // namespace entwine
