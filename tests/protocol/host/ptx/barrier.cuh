// Host stand-in for ffi/ptx/barrier.cuh. A barrier is a word: completed phases, arrivals of each
// phase, arrivals that this phase lacks.
#pragma once

#include "device.h"

namespace entwine::ptx {

inline void mbarrier_init(uint64_t* barrier, uint32_t num_arrivals) {
  *barrier = uint64_t{num_arrivals} << 16 | num_arrivals;
}

inline void mbarrier_arrive(uint64_t* barrier) {
  const std::atomic_ref word(*barrier);
  uint64_t before = word.load(std::memory_order_relaxed), after;
  do {
    const uint64_t missing = (before & 0xffff) - 1, arrivals = before >> 16 & 0xffff;
    after = missing > 0 ? before - 1 : ((before >> 32) + 1) << 32 | arrivals << 16 | arrivals;
  } while (!word.compare_exchange_weak(before, after, std::memory_order_acq_rel));
}

inline bool mbarrier_try_wait(const uint64_t* barrier, uint32_t parity) {
  const std::atomic_ref word(*const_cast<uint64_t*>(barrier));
  return (word.load(std::memory_order_acquire) >> 32 & 1) != parity;
}

}  // namespace entwine::ptx
