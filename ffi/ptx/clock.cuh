// Clocks: one instruction per function.
#pragma once

#include <cstdint>

namespace entwine::ptx {

// Nanoseconds; the same clock on all SMs of a GPU, coarse.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Cycles of this SM.
__device__ __forceinline__ int64_t sm_cycles() {
  int64_t value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value));
  return value;
}

}  // namespace entwine::ptx
