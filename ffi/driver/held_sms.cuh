// Holds SMs of some GPUs, as another program's kernel would.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "launch/launch.h"
#include "ptx/clock.cuh"

namespace entwine {

// Holds an SM each until told to go, at most `limit_ns`: a stand-in for another program's kernel.
static __global__ void hold_sms(volatile int* arrived, const volatile int* go, uint64_t limit_ns) {
  extern __shared__ unsigned char whole_sm[];
  if (threadIdx.x != 0) return;
  whole_sm[0] = 0;
  const uint64_t start = ptx::global_nanoseconds();
  atomicAdd_system(const_cast<int*>(arrived), 1);
  do {
    __nanosleep(1000);
  } while (*go == 0 && ptx::global_nanoseconds() - start < limit_ns);
}

// Holds all SMs of some devices but `num_free` of each, for as long as it lives.
class HeldSms {
 public:
  // Delegates, so that the destructor releases what is held already if a later step throws.
  HeldSms(const std::vector<int>& devices, int num_free) : HeldSms() {
    constexpr int kWholeSmBytes = 200 << 10;
    // Everything that could wait for a running kernel comes before the first of them is started.
    for (int device : devices) {
      Held held{device, nullptr, nullptr, 0};
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
      check_cuda(
          cudaHostAlloc(&held.words, 2 * sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating a test word");
      held.words[0] = held.words[1] = 0;
      check_cuda(cudaDeviceGetAttribute(&held.num_ctas, cudaDevAttrMultiProcessorCount, device),
                 "asking for the number of SMs");
      held.num_ctas -= num_free;
      check_cuda(cudaFuncSetAttribute(hold_sms, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kWholeSmBytes),
                 "loading the holding kernel");
      check_cuda(cudaStreamCreateWithFlags(&held.stream, cudaStreamNonBlocking),
                 "creating a stream");
      check_cuda(cudaDeviceSynchronize(), "preparing to hold SMs");
      held_.push_back(held);
    }
    for (Held& held : held_) {
      check_cuda(cudaSetDevice(held.device), "cudaSetDevice");
      hold_sms<<<held.num_ctas, 32, kWholeSmBytes, held.stream>>>(held.words, held.words + 1,
                                                                  uint64_t{20000000000});
      check_cuda(cudaGetLastError(), "holding SMs");
      const auto start = std::chrono::steady_clock::now();
      while (*const_cast<volatile int*>(held.words) < held.num_ctas) {
        if (std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) {
          throw std::runtime_error("the holding kernel did not become resident");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  // Throws if a holding kernel has ended by itself: then the calls under test had all SMs.
  void check_still_held() const {
    for (const Held& held : held_) {
      if (cudaStreamQuery(held.stream) != cudaErrorNotReady) {
        throw std::runtime_error("the SMs were not held to the end");
      }
      cudaGetLastError();  // "not ready" is one to CUDA
    }
  }

  ~HeldSms() {
    for (Held& held : held_) *const_cast<volatile int*>(held.words + 1) = 1;
    for (Held& held : held_) {
      cudaSetDevice(held.device);
      cudaStreamSynchronize(held.stream);
      cudaStreamDestroy(held.stream);
      cudaFreeHost(held.words);
    }
  }

 private:
  HeldSms() = default;

  struct Held {
    int device;
    int* words;  // arrived, go
    cudaStream_t stream;
    int num_ctas;
  };
  std::vector<Held> held_;
};

}  // namespace entwine
