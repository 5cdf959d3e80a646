// Device memory that lives as long as its owner.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "launch/launch.h"

namespace entwine {

// On the device that is current when it is made.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t num_bytes) {
    check_cuda(cudaMalloc(&pointer_, num_bytes), "allocating a test buffer");
  }
  ~DeviceBuffer() { cudaFree(pointer_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(pointer_);
  }

 private:
  void* pointer_ = nullptr;
};

}  // namespace entwine
