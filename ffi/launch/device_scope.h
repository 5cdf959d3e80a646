// The current device of the calling thread, restored on exit.
#pragma once

#include <cuda_runtime_api.h>

#include "launch/launch.h"

namespace entwine {

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

}  // namespace entwine
