#include "peer/rank_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "launch/launch.h"

namespace entwine {
namespace {
template <class T>
void** address_of(T*& pointer) {
  return reinterpret_cast<void**>(&pointer);
}

// The smallest tile of any instance (128x128, 16-bit): bounds how many tiles the slots can hold.
constexpr size_t kSmallestTileBytes = 128 * 128 * 2;
// AllGather needs flags for its pieces of rows, but no slots. entwine_jax/schedule/legality.py has
// the same numbers.
constexpr size_t kFewestSlots = 16384;
constexpr int kPoison = 0xff;
}  // namespace

void enable_peer_access(int peer) {
  // Whether XLA has done it already, CUDA tells by an error only.
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check_cuda(error, "enabling peer access to device " + std::to_string(peer));
  }
}

RankMemory::RankMemory(size_t slot_bytes) : slot_bytes_(slot_bytes) {
  try {
    check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    check_cuda(cudaMalloc(address_of(control_), control_bytes()), "allocating the control words");
    check_cuda(cudaMalloc(address_of(slots_), slot_bytes_), "allocating the workspace slots");
    check_cuda(cudaHostAlloc(address_of(failure_), sizeof(WaitFailure),
                             cudaHostAllocPortable | cudaHostAllocMapped),
               "allocating the failure record");
    *failure_ = WaitFailure{};
    check_cuda(cudaMemset(control_, 0, control_bytes()), "clearing the control words");
    check_cuda(cudaMemset(slots_, kPoison, slot_bytes_), "poisoning the slots");
    check_cuda(cudaStreamSynchronize(nullptr), "preparing the workspace");
  } catch (...) {
    release();
    throw;
  }
}

RankMemory::~RankMemory() { release(); }

void RankMemory::release() {
  // Errors are of no use here: after a failed kernel the context and its memory are gone already.
  int current = 0;
  cudaGetDevice(&current);
  cudaSetDevice(device_);
  cudaFree(control_);
  cudaFree(slots_);
  cudaFreeHost(failure_);
  cudaSetDevice(current);
  cudaGetLastError();
}

int RankMemory::max_slots() const {
  return static_cast<int>(std::max(slot_bytes_ / 2 / kSmallestTileBytes, kFewestSlots));
}

size_t RankMemory::control_bytes() const {
  return sizeof(ControlBlock) + ControlBlock::bytes_behind(max_slots());
}

}  // namespace entwine
