// Shared memory of a CTA, and the ring through which the loader warp tells the other warps which
// tiles are theirs.
#pragma once

#include "kernels/trace.cuh"
#include "peer/signal.cuh"

namespace entwine {

struct alignas(16) TileWork {
  TilePlace place;
  bool ends;  // there are no more tiles
};

// Deep enough that a push which waits its turn does not hold up the loads of the tile after the
// next.
constexpr int kWorkRing = 4;

template <class Config>
struct SharedStorage {
  alignas(1024) typename Config::Mainloop::TensorStorage mainloop;
  alignas(1024) unsigned char store_buffer[Config::kNumTeams][Config::kTileBytes];
  alignas(16) typename Config::Mainloop::PipelineStorage pipeline;
  alignas(16) TileWork work[kWorkRing];
  uint64_t work_full[kWorkRing], work_empty[kWorkRing];
  uint64_t buffer_full[Config::kNumTeams], buffer_empty[Config::kNumTeams];
  uint64_t mainloop_turn[Config::kNumTeams];
  int first_tile;  // negative: this CTA communicates
  uint64_t epoch;
  uint32_t num_units_stored;
};

// The `item`-th tile of this CTA. Every warp that calls this calls it for its tiles in order; the
// ring has one stage per item and one phase per lap, so a phase cannot be taken for another.
template <class Config>
__device__ __forceinline__ TileWork take_work(const PeerWindow& window,
                                              SharedStorage<Config>& shared, int item) {
  const int stage = item % kWorkRing;
  wait_phase(window, &shared.work_full[stage], item / kWorkRing & 1);
  const TileWork work = shared.work[stage];
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.work_empty[stage]);
  return work;
}

}  // namespace entwine
