// Shared memory of a CTA, and the ring through which the loader warp tells the other warps which
// items are theirs.
#pragma once

#include "kernels/trace.cuh"
#include "peer/signal.cuh"

namespace entwine {

struct alignas(16) TileWork {
  TilePlace place;
  bool ends;  // there are no more items
};

// Deep enough that a push which waits its turn does not hold up the loads of the item after the
// next.
constexpr int kWorkRing = 4;

// Warps 0 and 1 load and push, those from here on may communicate.
constexpr int kFirstSpareWarp = 2;

// AllGather: what a sender holds at a time, a row of a piece in each slot.
constexpr int kStagingBytes = 16384, kStagingSlots = 4;

template <class Config>
struct SharedStorage {
  // The operands of wide and of narrow tiles lie in the same memory: the loader warp changes from
  // one to the other when all stages are free.
  union {
    alignas(1024) typename Config::Wide::Mainloop::TensorStorage wide;
    alignas(1024) typename Config::Narrow::Mainloop::TensorStorage narrow;
    unsigned char operands[sizeof(typename Config::Narrow::Mainloop::TensorStorage)];
  };
  alignas(1024) unsigned char store_buffer[Config::Wide::kTileBytes];
  alignas(16) typename Config::Wide::Mainloop::PipelineStorage wide_pipeline;
  alignas(16) typename Config::Narrow::Mainloop::PipelineStorage narrow_pipeline;
  alignas(16) TileWork work[kWorkRing];
  uint64_t work_full[kWorkRing], work_empty[kWorkRing];
  uint64_t buffer_full, buffer_empty;
  uint64_t staging_full[kStagingSlots];
  int first_item;                         // negative: this CTA communicates
  bool sends;                             // AllGather: this CTA has a sender
  unsigned char* peer_output[kMaxRanks];  // AllGather: of the sender, every rank's gathered x
  uint64_t epoch;
  uint32_t num_units_stored;
};

// AllGather has tiles of one shape, and the memory that this shape leaves over.
template <class Config>
__device__ __forceinline__ unsigned char* staging(SharedStorage<Config>& shared, int tile_n) {
  constexpr size_t kWideBytes = sizeof(shared.wide);
  static_assert(kWideBytes + kStagingBytes <= sizeof(shared.operands));
  static_assert(Config::Narrow::kTileBytes + kStagingBytes <= Config::Wide::kTileBytes);
  return tile_n == Config::Wide::kTileN ? shared.operands + kWideBytes
                                        : shared.store_buffer + Config::Narrow::kTileBytes;
}

// The `item`-th item of this CTA, until release_work. Every warp that calls this calls both for all items
// in order; the ring has one stage per item and one phase per lap, so a phase cannot be taken for
// another. Every lane reads for itself, so every lane acquires and releases for itself.
template <class Config>
__device__ __forceinline__ const TileWork& wait_work(const PeerWindow& window,
                                                     SharedStorage<Config>& shared, int item) {
  const int stage = item % kWorkRing;
  wait_phase(window, &shared.work_full[stage], item / kWorkRing & 1);
  return shared.work[stage];
}

template <class Config>
__device__ __forceinline__ void release_work(SharedStorage<Config>& shared, int item) {
  ptx::mbarrier_arrive(&shared.work_empty[item % kWorkRing]);
}

template <class Config>
__device__ __forceinline__ TileWork take_work(const PeerWindow& window,
                                              SharedStorage<Config>& shared, int item) {
  const TileWork work = wait_work(window, shared, item);
  release_work(shared, item);
  return work;
}

}  // namespace entwine
