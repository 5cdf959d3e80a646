// Host stand-in for ffi/ptx/memory.cuh: the same functions with the same order.
#pragma once

#include "device.h"

#ifdef MUTANT_RELAXED_RELEASE
#define ENTWINE_RELEASE std::memory_order_relaxed
#else
#define ENTWINE_RELEASE std::memory_order_release
#endif
#ifdef MUTANT_RELAXED_ACQUIRE
#define ENTWINE_ACQUIRE std::memory_order_relaxed
#else
#define ENTWINE_ACQUIRE std::memory_order_acquire
#endif

namespace entwine::ptx {

inline uint64_t load(const uint64_t* address, std::memory_order order) {
  return std::atomic_ref(*const_cast<uint64_t*>(address)).load(order);
}

inline uint64_t load_acquire_system(const uint64_t* address) {
  return load(address, ENTWINE_ACQUIRE);
}

inline uint64_t load_relaxed_gpu(const uint64_t* address) {
  return load(address, std::memory_order_relaxed);
}

inline uint64_t load_relaxed_system(const uint64_t* address) {
  return load(address, std::memory_order_relaxed);
}

inline void store_relaxed_system(uint64_t* address, uint64_t value) {
  std::atomic_ref(*address).store(value, std::memory_order_relaxed);
}

inline void store_release_system(uint64_t* address, uint64_t value) {
  std::atomic_ref(*address).store(value, ENTWINE_RELEASE);
}

inline void add_relaxed_system(uint64_t* address, uint64_t value) { host::add(*address, value); }

inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
#ifdef MUTANT_RELAXED_EXIT
  return std::atomic_ref(*address).fetch_add(value, std::memory_order_relaxed);
#else
  return std::atomic_ref(*address).fetch_add(value, std::memory_order_acq_rel);
#endif
}

inline void fence_system() { host::fence(); }

}  // namespace entwine::ptx
