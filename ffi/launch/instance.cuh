// Host code of one kernel instance: tensor maps, parameters, launch.
#pragma once

#include <cudaTypedefs.h>

#include <algorithm>
#include <cutlass/util/packed_stride.hpp>

#include "kernels/fused.cuh"
#include "launch/instance.h"
#include "launch/item_layout.h"

namespace entwine {

template <class Config>
void load_instance() {
  cudaFuncAttributes attributes{};
  // Asking for the attributes loads the kernel on the current device.
  check_cuda(cudaFuncGetAttributes(&attributes, fused_kernel<Config>), "loading the fused kernel");
  check_cuda(cudaFuncSetAttribute(fused_kernel<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  sizeof(SharedStorage<Config>)),
             "reserving shared memory for the fused kernel");
}

// The operands x [rows, k] and w as the mainloop takes them.
template <class Mainloop>
typename Mainloop::Params operand_maps(const void* x, int rows, const Call& call) {
  using Element = typename Mainloop::ElementA;
  const int n = call.n, k = call.k;
  const typename Mainloop::Arguments arguments{
      static_cast<const Element*>(x),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideA{}, {rows, k, 1}),
      static_cast<const Element*>(call.w),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideB{}, {n, k, 1})};
  return Mainloop::to_underlying_arguments(cute::make_shape(rows, n, k, 1), arguments, nullptr);
}

// AllGather's output [blocks, block_rows, n] in boxes of one panel of a tile.
template <class Config>
CUtensorMap output_map(void* output, uint64_t num_blocks, uint64_t block_rows, uint64_t n) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result),
               "looking for cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  constexpr uint64_t kElementBytes = sizeof(typename Config::Element);
  const cuuint64_t sizes[] = {n, block_rows, num_blocks};
  const cuuint64_t strides[] = {n * kElementBytes, block_rows * n * kElementBytes};
  const cuuint32_t box[] = {kPanelColumns, kTileM, 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  constexpr auto kType = std::is_same_v<typename Config::Element, cutlass::half_t>
                             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map{};
  // The swizzle of 128 bytes is the XOR of chunk_offset.
  const CUresult result =
      encode(&map, kType, 3, output, sizes, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("describing the output to the copy engine failed: driver error " +
                             std::to_string(result));
  }
  return map;
}

// Of `last_wave` items, the last of the launch. (ReduceScatter: this rank's own ones, as far as there are.)
inline OwnSlots own_slots(Op op, const ItemLayout& layout, int last_wave,
                          const PeerWindow& window) {
  if (op == Op::kReduceScatter) {
    return {layout.items.num_whole, layout.slots_per_source - last_wave};
  }
  const auto owned = [&](int num_items) {
    return num_owned_tiles(num_items, window.num_ranks, window.rank);
  };
  return {owned(layout.items.num_whole), owned(layout.num_items - last_wave)};
}

// AllGather: fewer senders do not fill the links in time, more of them slow the mainloops down.
// Measured with a sender in every tenth CTA to one in each.
constexpr int kCtasPerSender = 2;

template <class Config>
void launch_instance(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
                     const PeerWindow& window, int num_ctas, cudaStream_t stream) {
  using Wide = typename Config::Wide;
  using Narrow = typename Config::Narrow;
  constexpr bool kGathers = Config::kOp == Op::kAllGather;
  const int num_ranks = window.num_ranks, m = call.m, n = call.n;
  const ItemLayout layout = item_layout(call.op, blocks, n, schedule, num_ranks);
  const void* x = kGathers ? call.gathered : call.x;
  const int own_rows = m / num_ranks;
  const auto wide = operand_maps<typename Wide::Mainloop>(x, m, call);
  const auto narrow = operand_maps<typename Narrow::Mainloop>(x, m, call);
  const bool wide_tiles = schedule.tile_n == Wide::kTileN;
  const int units_of_tile = wide_tiles ? Wide::kUnitsPerTile : Narrow::kUnitsPerTile;
  const int num_math_ctas = num_ctas - static_cast<int>(schedule.num_comm_ctas);
  constexpr bool kScatters = Config::kOp == Op::kReduceScatter;
  int last_wave = (layout.num_items - 1) % num_math_ctas + 1;
  if (kScatters) last_wave = std::min(last_wave, layout.slots_per_source);
  FusedParams<Config> params{
      .wide = wide,
      .narrow = narrow,
      .wide_own = kGathers ? operand_maps<typename Wide::Mainloop>(call.x, own_rows, call) : wide,
      .narrow_own =
          kGathers ? operand_maps<typename Narrow::Mainloop>(call.x, own_rows, call) : narrow,
      .output_map = {},
      .window = window,
      .x = call.x,
      .shared_output = kGathers ? call.gathered : call.output,
      .output = call.output,
      .order = make_tile_order(blocks, layout.num_tiles_n, static_cast<int>(schedule.raster),
                               num_ranks, kTileM),
      .block_rows = make_divisor(blocks.block_rows),
      .m = m,
      .n = n,
      .k = static_cast<int>(call.k),
      .tile_n = static_cast<int>(schedule.tile_n),
      .items = layout.items,
      .slots = own_slots(call.op, layout, last_wave, window),
      .num_items = layout.num_items,
      .num_units = (layout.items.num_whole + layout.items.num_split) * units_of_tile,
      .slots_per_source = layout.slots_per_source,
      .slot_bytes = wide_tiles ? Wide::kTileBytes : Narrow::kTileBytes,
      .own_last = kScatters ? last_wave : 0,
      .num_k_tiles = ceil_div(static_cast<int>(call.k), kTileK),
      .num_comm_ctas = static_cast<int>(schedule.num_comm_ctas),
      .num_senders = kGathers ? std::max(1, num_ctas / kCtasPerSender) : 0,
      .num_spare_warps = static_cast<int>(schedule.num_spare_warps),
      .push_spread = static_cast<int>(schedule.push_spread),
      .num_turns = make_divisor(ceil_div(num_ctas, num_ranks)),
      .trace = call.trace,
  };
  if (kGathers) {
    params.output_map =
        output_map<Config>(call.output, call.num_batches * num_ranks, blocks.block_rows, call.n);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = num_ctas;
  config.blockDim = kNumThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage<Config>);
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, fused_kernel<Config>, params),
             "launching the fused kernel");
}

template <class Element, Op kOp, bool kWTransposed, bool kTraced>
constexpr Instance make_instance(Dtype dtype) {
  using Config = KernelConfig<Element, kOp, kWTransposed, kTraced>;
  return {kOp, dtype, kWTransposed, kTraced, load_instance<Config>, launch_instance<Config>};
}

template <class Element, bool kWTransposed, bool kTraced>
constexpr Instances make_instances(Dtype dtype) {
  return {make_instance<Element, Op::kAllReduce, kWTransposed, kTraced>(dtype),
          make_instance<Element, Op::kReduceScatter, kWTransposed, kTraced>(dtype),
          make_instance<Element, Op::kAllGather, kWTransposed, kTraced>(dtype)};
}

}  // namespace entwine
