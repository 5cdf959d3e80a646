// What the ranks of a group share in device memory: one control block and one array of slots each.
//
// | word         | fact it states                                         | written by      | read
// by |
// |--------------|--------------------------------------------------------|-----------------|---------|
// | ready        | the peer's kernel of this epoch has started; its output | the peer        |
// owner   | | tile_ready   | the source's partial of this tile lies in its slot      | the source
// | owner   | | arrived      | so many units have been stored to this rank's output    | every
// owner     | rank    | | next_*, exited, epoch, arrived_base | counters of this rank alone      |
// rank            | rank    |
//
// All of them only grow from call to call and are never reset, except the counters of one launch,
// which its last CTA sets back. Epochs have 64 bits: a flag that was last set any time ago stays in
// the past.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile_order.cuh"

namespace entwine {

constexpr int kMaxRanks = 8;

struct alignas(16) ReadyWord {
  uint64_t output;  // address of the output that the peer's kernel of `epoch` may be sent
  uint64_t epoch;
};

struct ControlBlock {
  // Counters of one launch: the work and the roles that are still to be given out.
  alignas(128) uint32_t next_tile;
  alignas(128) uint32_t next_unit;
  alignas(128) uint32_t next_cta;
  alignas(128) uint32_t exited;
  uint32_t failed;        // 1 once a wait has passed its deadline
  uint64_t epoch;         // launches that have ended on this rank: in step on all ranks
  uint64_t arrived_base;  // `arrived` at the end of the last launch

  alignas(128) ReadyWord ready[kMaxRanks];  // by peer
  alignas(128) uint64_t arrived;

  // By slot and source: the epoch in which that partial has arrived. Follows the block in memory.
  ENTWINE_HOST_DEVICE uint64_t* tile_ready(int slot, int source) {
    return reinterpret_cast<uint64_t*>(this + 1) + slot * kMaxRanks + source;
  }
};

// What a wait that passed its deadline leaves in pinned host memory. Written once.
struct WaitFailure {
  uint32_t kind;  // WaitKind; 0: nothing failed
  int32_t rank;
  int32_t peer;
  int32_t tile;
  uint64_t expected;
  uint64_t seen;
};

enum WaitKind : uint32_t {
  kWaitNone = 0,
  kWaitTileReady = 1,
  kWaitPeerReady = 2,
  kWaitArrived = 3,
  kWaitBarrier = 4,
};

// The addresses of all ranks' shared memory, as seen from one of them.
struct PeerWindow {
  int rank;
  int num_ranks;
  ControlBlock* control[kMaxRanks];
  unsigned char* slots[kMaxRanks];
  size_t parity_bytes;   // the slots of one parity; two lie behind each other
  int max_owned_tiles;   // rows of tile_ready
  WaitFailure* failure;  // pinned host memory of this rank
  uint64_t deadline_ns;
};

}  // namespace entwine
