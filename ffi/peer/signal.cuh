// Setting and awaiting the words of a ControlBlock. Order and scope are in the names; every wait
// ends, either with the awaited value or, past the deadline, with a record for the host and a trap.
#pragma once

#include "peer/control_block.h"
#include "ptx/barrier.cuh"
#include "ptx/clock.cuh"
#include "ptx/memory.cuh"

namespace entwine {

// The last act of a kernel whose wait passed its deadline. The first thread of the rank to get here
// tells the host; the trap ends the kernel and with it the CUDA context: better than a wrong
// result.
__device__ __forceinline__ void fail_wait(const PeerWindow& window, WaitKind kind, int peer,
                                          int tile, uint64_t expected, uint64_t seen) {
  if (atomicExch(&window.control[window.rank]->failed, 1u) == 0) {
    *window.failure = {kWaitNone, window.rank, peer, tile, expected, seen, window.call};
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&window.failure->kind) = kind;
    __threadfence_system();
  } else {
    // The first one may still be on its way to the host: give it a millisecond before the trap.
#pragma unroll 1
    for (int i = 0; i < 1000; i++) __nanosleep(1000);
  }
  __trap();
}

class Deadline {
 public:
  __device__ explicit Deadline(const PeerWindow& window, int times = 1)
      : end_(ptx::global_nanoseconds() + times * window.deadline_ns) {}
  __device__ bool passed() const { return ptx::global_nanoseconds() > end_; }

 private:
  uint64_t end_;
};

// Called by one thread. Acquires at system scope: what the thread that released `epoch` had done or
// seen before is visible to this thread afterwards, and to its warp after __syncwarp(). `word` lies
// in this GPU's memory (peers set it from afar), so polling does not load the links.
__device__ __forceinline__ void wait_epoch(const PeerWindow& window, const uint64_t* word,
                                           uint64_t epoch, WaitKind kind, int peer, int tile) {
  uint64_t seen = ptx::load_acquire_system(word);
  if (seen >= epoch) return;
  const Deadline deadline(window);
  while ((seen = ptx::load_acquire_system(word)) < epoch) {
    __nanosleep(64);
    if (deadline.passed()) fail_wait(window, kind, peer, tile, epoch, seen);
  }
}

// As wait_epoch, for the number of units that have arrived in this rank's output.
__device__ __forceinline__ void wait_arrived(const PeerWindow& window, uint64_t expected) {
  const uint64_t* word = &window.control[window.rank]->arrived;
  const Deadline deadline(window);
  uint64_t seen;
  while ((seen = ptx::load_acquire_system(word)) < expected) {
    if (deadline.passed()) fail_wait(window, kWaitArrived, -1, -1, expected, seen);
  }
}

// Waits for a phase of an mbarrier of this CTA. Only warps of the same CTA and its own copies
// arrive there. Such a warp may itself wait for a peer, and have begun later: twice the deadline lets it
// report first, as it can name the peer.
__device__ __forceinline__ void wait_phase(const PeerWindow& window, const uint64_t* barrier,
                                           uint32_t parity) {
  if (ptx::mbarrier_try_wait(barrier, parity)) return;
  const Deadline deadline(window, 2);
  while (!ptx::mbarrier_try_wait(barrier, parity)) {
    if (deadline.passed()) fail_wait(window, kWaitBarrier, -1, -1, parity, parity ^ 1);
  }
}

// Tells `peer` that this rank's kernel of `epoch` has started and may be sent its output at
// `output`. The release orders the address before the epoch, and whatever earlier kernels of this GPU
// did with that memory before what the peer, having acquired the epoch, stores there.
__device__ __forceinline__ void set_ready(const PeerWindow& window, int peer, void* output,
                                          uint64_t epoch) {
  ReadyWord* word = &window.control[peer]->ready[window.rank];
  ptx::store_relaxed_system(&word->output, reinterpret_cast<uint64_t>(output));
  ptx::store_release_system(&word->epoch, epoch);
}

// Called by one thread: the address where `peer` wants its output of `epoch`.
__device__ __forceinline__ void* wait_peer_output(const PeerWindow& window, int peer,
                                                  uint64_t epoch) {
  const ReadyWord* word = &window.control[window.rank]->ready[peer];
  wait_epoch(window, &word->epoch, epoch, kWaitPeerReady, peer, -1);
  return reinterpret_cast<void*>(ptx::load_relaxed_system(&word->output));
}

}  // namespace entwine
