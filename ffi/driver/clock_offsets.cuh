// How far the clocks of two GPUs are apart, by messages back and forth over NVLink.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>

#include "driver/device_buffer.h"
#include "launch/launch.h"
#include "ptx/clock.cuh"
#include "ptx/memory.cuh"

namespace entwine {

// In the memory of one of the two GPUs: the last message that it got.
struct ClockMessage {
  uint64_t round;
  uint64_t sent_ns;
};

__device__ inline bool wait_message(const ClockMessage* inbox, uint64_t round) {
  constexpr uint64_t kLongestWaitNs = 2'000'000'000;
  const uint64_t start = ptx::global_nanoseconds();
  while (ptx::load_acquire_system(&inbox->round) < round) {
    if (ptx::global_nanoseconds() - start > kLongestWaitNs) return false;
  }
  return true;
}

__device__ inline void send_message(ClockMessage* peer_inbox, uint64_t round) {
  ptx::store_relaxed_system(&peer_inbox->sent_ns, ptx::global_nanoseconds());
  ptx::store_release_system(&peer_inbox->round, round);
}

constexpr uint64_t kClockRounds = 200;

inline __global__ void answer_clock(const ClockMessage* inbox, ClockMessage* peer_inbox) {
  for (uint64_t round = 1; round <= kClockRounds; round++) {
    if (!wait_message(inbox, round)) return;
    send_message(peer_inbox, round);
  }
}

// The answer of the quickest round was sent half way between question and arrival, give or take half
// of that round: about 1 us.
inline __global__ void ask_clock(const ClockMessage* inbox, ClockMessage* peer_inbox,
                                 int64_t* offset_ns) {
  uint64_t quickest = ~uint64_t{0};
  for (uint64_t round = 1; round <= kClockRounds; round++) {
    const uint64_t asked = ptx::global_nanoseconds();
    send_message(peer_inbox, round);
    if (!wait_message(inbox, round)) return;
    const uint64_t took = ptx::global_nanoseconds() - asked;
    if (took < quickest) {
      quickest = took;
      *offset_ns = static_cast<int64_t>(ptx::load_relaxed_system(&inbox->sent_ns)) -
                   static_cast<int64_t>(asked + took / 2);
    }
  }
}

// Nanoseconds that the clock of `device` is ahead of that of `reference`. The two have peer access.
inline int64_t clock_offset(int device, int reference) {
  if (device == reference) return 0;
  const auto make_inbox = [](int owner) {
    check_cuda(cudaSetDevice(owner), "cudaSetDevice");
    auto inbox = std::make_unique<DeviceBuffer>(sizeof(ClockMessage));
    check_cuda(cudaMemset(inbox->as<void>(), 0, sizeof(ClockMessage)), "clearing a message");
    check_cuda(cudaDeviceSynchronize(), "clearing a message");
    return inbox;
  };
  constexpr int64_t kNoAnswer = std::numeric_limits<int64_t>::min();
  int64_t offset = kNoAnswer;
  const auto answering = make_inbox(device), asking = make_inbox(reference);
  const DeviceBuffer result(sizeof(offset));
  check_cuda(cudaMemcpy(result.as<void>(), &offset, sizeof(offset), cudaMemcpyHostToDevice),
             "preparing to compare clocks");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  answer_clock<<<1, 1>>>(answering->as<ClockMessage>(), asking->as<ClockMessage>());
  check_cuda(cudaGetLastError(), "comparing clocks");
  check_cuda(cudaSetDevice(reference), "cudaSetDevice");
  ask_clock<<<1, 1>>>(asking->as<ClockMessage>(), answering->as<ClockMessage>(),
                      result.as<int64_t>());
  check_cuda(cudaMemcpy(&offset, result.as<void>(), sizeof(offset), cudaMemcpyDeviceToHost),
             "comparing clocks");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  check_cuda(cudaDeviceSynchronize(), "comparing clocks");
  if (offset == kNoAnswer) {
    throw std::runtime_error("comparing clocks: the other GPU did not answer");
  }
  return offset;
}

}  // namespace entwine
