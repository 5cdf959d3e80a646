// One of the ranks that the driver plays: its part of a GPU, and what it shares with the others.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "driver/operands.cuh"
#include "launch/launch.h"
#include "peer/rank_memory.h"

namespace entwine {

struct Rank {
  explicit Rank(int on_device) : device(on_device) {
    make_current();
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    check_cuda(cudaEventCreate(&begin), "creating an event");
    check_cuda(cudaEventCreate(&end), "creating an event");
    shared = std::make_unique<RankMemory>(kSlotBytes);
  }
  ~Rank() {
    cudaSetDevice(device);
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void make_current() const { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

  static constexpr size_t kSlotBytes = size_t{256} << 20;

  int device;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::unique_ptr<RankMemory> shared;
  PeerWindow window{};
  std::vector<Operands> operands;  // by problem
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

// The window of `rank`, whose memory is the one of that place.
inline PeerWindow make_window(const std::vector<const RankMemory*>& memories, int rank,
                              double deadline_seconds) {
  const RankMemory& own = *memories[rank];
  PeerWindow window{};
  window.rank = rank;
  window.num_ranks = static_cast<int>(memories.size());
  for (int peer = 0; peer < window.num_ranks; peer++) {
    window.control[peer] = memories[peer]->control();
    window.slots[peer] = memories[peer]->slots();
  }
  window.parity_bytes = own.slot_bytes() / 2;
  window.max_slots = own.max_slots();
  window.failure = own.failure();
  window.deadline_ns = static_cast<uint64_t>(deadline_seconds * 1e9);
  return window;
}

// Waits for all kernels; an error says what they waited for.
void synchronize(const Ranks& ranks);

}  // namespace entwine
