// Host stand-in for ffi/ptx/clock.cuh.
#pragma once

#include "device.h"

namespace entwine::ptx {

// Every wait asks for the time in its loop: the moment to let other threads run.
inline uint64_t global_nanoseconds() {
  std::this_thread::yield();
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace entwine::ptx
