// Records what a warp does between two points of its role, in the instances that are traced.
#pragma once

#include "kernels/config.cuh"
#include "ptx/clock.cuh"

namespace entwine {

// From construction to destruction. The recording thread is the one for which `records` holds.
template <class Config>
class Span {
 public:
  __device__ __forceinline__ Span(const FusedParams<Config>& params, TraceKind kind, int tile,
                                  bool records)
      : params_(params), kind_(kind), tile_(tile), records_(records) {
    if constexpr (Config::kTraced) start_ns_ = ptx::global_nanoseconds();
  }
  Span(const Span&) = delete;

  __device__ __forceinline__ ~Span() {
    if constexpr (Config::kTraced) {
      if (!records_) return;
      const TraceBuffer& trace = params_.trace;
      const uint32_t event = atomicAdd(trace.num_events, 1u);
      if (event >= trace.capacity) return;
      trace.events[event] = {start_ns_,
                             ptx::global_nanoseconds(),
                             tile_,
                             static_cast<uint16_t>(params_.window.rank),
                             static_cast<uint16_t>(blockIdx.x),
                             static_cast<uint8_t>(threadIdx.x / 32),
                             kind_,
                             {}};
    }
  }

 private:
  const FusedParams<Config>& params_;
  TraceKind kind_;
  int tile_;
  bool records_;
  uint64_t start_ns_ = 0;
};

__device__ __forceinline__ bool is_lane_0() { return threadIdx.x % 32 == 0; }

}  // namespace entwine
