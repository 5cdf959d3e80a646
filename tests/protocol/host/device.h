// The words of CUDA C++ that the protocol's headers use, for a host compiler with ThreadSanitizer.
//
// ThreadSanitizer does not know fences. One is played by the accesses around it: the counter that the
// thread has read last is acquired, and whatever it writes to a counter from then on is released.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#define __device__
#define __forceinline__ inline

namespace entwine::host {

inline thread_local uint32_t* last_counter = nullptr;
inline thread_local bool fenced = false;

inline void fence() {
#ifndef MUTANT_NO_FENCE
  if (last_counter != nullptr) std::atomic_ref(*last_counter).load(std::memory_order_acquire);
  fenced = true;
#endif
}

template <class Word>
Word add(Word& word, Word value) {
  const std::atomic_ref atomic(word);
  return fenced ? atomic.fetch_add(value, std::memory_order_release)
                : atomic.fetch_add(value, std::memory_order_relaxed);
}

}  // namespace entwine::host

inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  entwine::host::last_counter = address;
  return entwine::host::add(*address, value);
}

inline uint32_t atomicExch(uint32_t* address, uint32_t value) {
  return std::atomic_ref(*address).exchange(value, std::memory_order_relaxed);
}

inline void __threadfence_system() { entwine::host::fence(); }

inline void __nanosleep(unsigned nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
}

namespace entwine::host {

struct Trapped {};

}  // namespace entwine::host

// Ends the thread; on a GPU the whole kernel.
[[noreturn]] inline void __trap() { throw entwine::host::Trapped{}; }
