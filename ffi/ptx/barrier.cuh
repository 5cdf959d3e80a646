// mbarriers: one instruction per function.
#pragma once

#include <cstdint>

#include "ptx/bulk_copy.cuh"

namespace entwine::ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals)
               : "memory");
}

// Releases this thread's writes at CTA scope.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// The same, and the phase waits for so many bytes of bulk loads besides.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(num_bytes)
      : "memory");
}

// True once the phase of this parity is complete; acquires at CTA scope. May suspend the thread for
// a while that the hardware bounds.
__device__ __forceinline__ bool mbarrier_try_wait(const uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace entwine::ptx
