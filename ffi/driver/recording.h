// The memory that traced calls of one rank record into.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/device_buffer.h"
#include "launch/trace.h"

namespace entwine {

// Of one call on one rank.
class Recording {
 public:
  // On the current device.
  Recording()
      : memory_(std::make_unique<DeviceBuffer>(kHeadBytes + kCapacity * sizeof(TraceEvent))) {
    check_cuda(cudaMemset(num_events(), 0, sizeof(uint32_t)), "clearing a trace");
  }

  TraceBuffer buffer() const { return {events(), num_events(), kCapacity}; }

  // Of a call that has ended.
  std::vector<TraceEvent> read() const {
    uint32_t count = 0;
    check_cuda(cudaMemcpy(&count, num_events(), sizeof(count), cudaMemcpyDeviceToHost),
               "reading a trace");
    if (count > kCapacity) {
      throw std::runtime_error("the call has " + std::to_string(count) + " events; at most " +
                               std::to_string(kCapacity) + " of a rank can be traced");
    }
    std::vector<TraceEvent> found(count);
    check_cuda(
        cudaMemcpy(found.data(), events(), count * sizeof(TraceEvent), cudaMemcpyDeviceToHost),
        "reading a trace");
    return found;
  }

 private:
  static constexpr uint32_t kCapacity = 1 << 20;
  static constexpr size_t kHeadBytes = 256;

  uint32_t* num_events() const { return memory_->as<uint32_t>(); }
  TraceEvent* events() const {
    return reinterpret_cast<TraceEvent*>(memory_->as<char>() + kHeadBytes);
  }

  std::unique_ptr<DeviceBuffer> memory_;
};

}  // namespace entwine
