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

// w as the mainloop takes it.
template <class Mainloop>
typename Mainloop::Params w_maps(const Call& call) {
  using Element = typename Mainloop::ElementA;
  const int m = call.m, n = call.n, k = call.k;
  const typename Mainloop::Arguments arguments{
      static_cast<const Element*>(call.x),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideA{}, {m, k, 1}),
      static_cast<const Element*>(call.w),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideB{}, {n, k, 1})};
  return Mainloop::to_underlying_arguments(cute::make_shape(m, n, k, 1), arguments, nullptr);
}

// A row-major array of 16-bit elements, the fastest dimension first, in boxes of 128 bytes by `box_rows`
// rows. The swizzle of 128 bytes is that of the operands in shared memory, and the XOR of chunk_offset.
template <class Element, int kNumDimensions>
CUtensorMap tensor_map(const void* array, const cuuint64_t (&sizes)[kNumDimensions],
                       uint32_t box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result),
               "looking for cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  constexpr auto kType = std::is_same_v<Element, cutlass::half_t>
                             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t strides[kNumDimensions - 1], stride = sizeof(Element);
  cuuint32_t box[kNumDimensions], element_strides[kNumDimensions];
  for (int i = 0; i < kNumDimensions; i++) {
    if (i > 0) strides[i - 1] = stride;
    stride *= sizes[i];
    box[i] = i == 0 ? kPanelColumns : i == 1 ? box_rows : 1;
    element_strides[i] = 1;
  }
  CUtensorMap map{};
  const CUresult result =
      encode(&map, kType, kNumDimensions, const_cast<void*>(array), sizes, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("describing an array to the copy engine failed: driver error " +
                             std::to_string(result));
  }
  return map;
}

// Of `last_wave` items (were k not split), the last of the launch. (ReduceScatter: this rank's own ones, as
// far as there are.)
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

// AllGather: CTAs that send beside computing; more than these where one starts so late that others have
// ended their first items.
inline int num_senders(const Schedule& schedule, int num_ctas) {
  const int given = static_cast<int>(schedule.num_senders);
  return given > 0 ? given : std::max(1, num_ctas / 2);
}

template <class Config>
void launch_instance(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
                     const PeerWindow& window, int num_ctas, cudaStream_t stream) {
  using Wide = typename Config::Wide;
  using Narrow = typename Config::Narrow;
  constexpr bool kGathers = Config::kOp == Op::kAllGather;
  const int num_ranks = window.num_ranks, m = call.m, n = call.n;
  const ItemLayout layout = item_layout(call.op, blocks, n, schedule, num_ranks);
  const int k = call.k, split_k = schedule.split_k;
  // The swizzle repeats every 8 rows.
  const uint32_t box_rows = std::min(kTileM, ceil_div(blocks.rows, 8) * 8);
  const auto x_map = [&](const void* x, int rows) {
    return tensor_map<typename Config::Element, 2>(
        x, {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)}, box_rows);
  };
  const bool wide_tiles = schedule.tile_n == Wide::kTileN;
  const int units_of_tile = wide_tiles ? Wide::kUnitsPerTile : Narrow::kUnitsPerTile;
  const int num_comm_ctas = static_cast<int>(schedule.num_comm_ctas);
  const int num_math_ctas = num_ctas - num_comm_ctas;
  constexpr bool kScatters = Config::kOp == Op::kReduceScatter;
  // In the last wave are the last parts of so many items.
  int last_wave = ceil_div((layout.num_items * split_k - 1) % num_math_ctas + 1, split_k);
  if (kScatters) last_wave = std::min(last_wave, layout.slots_per_source);
  FusedParams<Config> params{
      .wide = w_maps<typename Wide::Mainloop>(call),
      .narrow = w_maps<typename Narrow::Mainloop>(call),
      .x_map = x_map(kGathers ? call.gathered : call.x, m),
      .own_x_map = {},
      .output_map = {},
      .window = window,
      .x = call.x,
      .shared_output = kGathers ? call.gathered : call.output,
      .output = call.output,
      .order = make_tile_order(blocks, layout.num_tiles_n, static_cast<int>(schedule.raster),
                               num_ranks, kTileM),
      .block_rows = make_divisor(blocks.block_rows),
      .n = n,
      .k = k,
      .tile_n = static_cast<int>(schedule.tile_n),
      .items = layout.items,
      .slots = own_slots(call.op, layout, last_wave, window),
      .num_items = layout.num_items * split_k,
      .num_units = (layout.items.num_whole + layout.items.num_split) * units_of_tile,
      .split_k = make_divisor(split_k),
      .num_sources = num_ranks * split_k,
      .slots_per_source = layout.slots_per_source,
      .slot_bytes = wide_tiles ? Wide::kTileBytes : Narrow::kTileBytes,
      .own_last = kScatters ? last_wave : 0,
      .x_box_bytes = static_cast<int>(box_rows) * kTileK * 2,
      .num_k_tiles = num_k_tiles(k, split_k),
      .num_comm_ctas = num_comm_ctas,
      .num_senders = kGathers ? num_senders(schedule, num_ctas) : 0,
      .num_spare_warps = static_cast<int>(schedule.num_spare_warps),
      .push_spread = static_cast<int>(schedule.push_spread),
      .num_turns = make_divisor(ceil_div(num_ctas, num_ranks)),
      .trace = call.trace,
  };
  if constexpr (kGathers) {
    params.own_x_map = x_map(call.x, m / num_ranks);
    params.output_map = tensor_map<typename Config::Element, 3>(
        call.output,
        {static_cast<cuuint64_t>(call.n), static_cast<cuuint64_t>(blocks.block_rows),
         static_cast<cuuint64_t>(call.num_batches * num_ranks)},
        kTileM);
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
