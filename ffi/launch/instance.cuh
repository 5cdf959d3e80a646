// Host code of one kernel instance: tensor maps, parameters, launch.
#pragma once

#include <cutlass/util/packed_stride.hpp>

#include "kernels/fused.cuh"
#include "launch/instance.h"

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

template <class Config>
void launch_instance(const Operands& operands, const Schedule& schedule, const PeerWindow& window,
                     int num_ctas, cudaStream_t stream) {
  using Element = typename Config::Element;
  using Mainloop = typename Config::Mainloop;
  const int m = operands.m, n = operands.n, k = operands.k;
  const typename Mainloop::Arguments arguments{
      static_cast<const Element*>(operands.x),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideA{}, {m, k, 1}),
      static_cast<const Element*>(operands.w),
      cutlass::make_cute_packed_stride(typename Mainloop::StrideB{}, {n, k, 1})};
  FusedParams<Config> params{
      .mainloop =
          Mainloop::to_underlying_arguments(cute::make_shape(m, n, k, 1), arguments, nullptr),
      .window = window,
      .output = operands.output,
      .m = m,
      .n = n,
      .k = k,
      .num_tiles_m = ceil_div(m, Config::kTileM),
      .num_tiles_n = ceil_div(n, Config::kTileN),
      .num_k_tiles = ceil_div(k, Config::kTileK),
      .raster = static_cast<int>(schedule.raster),
      .num_comm_ctas = static_cast<int>(schedule.num_comm_ctas),
      .num_spare_warps = static_cast<int>(schedule.num_spare_warps),
      .push_spread = static_cast<int>(schedule.push_spread),
  };
  cudaLaunchConfig_t config{};
  config.gridDim = num_ctas;
  config.blockDim = Config::kNumThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage<Config>);
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, fused_kernel<Config>, params),
             "launching the fused kernel");
}

template <class Config>
constexpr Instance make_instance(Dtype dtype) {
  return {dtype,
          Config::kTileM,
          Config::kTileN,
          Config::kTileBytes,
          load_instance<Config>,
          launch_instance<Config>};
}

}  // namespace entwine
