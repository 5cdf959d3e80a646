// What the ranks of a group share in device memory: one control block and one array of slots each.
//
// word        | the fact it states                                          | set by    | awaited by
// ------------|-------------------------------------------------------------|-----------|-----------
// ready       | the peer's kernel of this epoch has started; its output (or | the peer  | the sender
//             | its gathered x) is at this address                          |           |
// tile_ready  | the source's partial of this item lies in its slot          | the source| the owner
// rows_ready  | this piece of the source's rows lies in the gathered x      | the source| the loader
// arrived     | so many units have been stored to this rank's output        | owners    | the rank
// next_*, exited, epoch, arrived_base, units_sent: counters of this rank alone
//
// All of them only grow from call to call and are never reset, except the counters of one launch, which
// that launch sets back. Epochs have 64 bits: a flag set by an earlier call is never taken for a current
// one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tile_order.cuh"

namespace entwine {

constexpr int kMaxRanks = 8;
constexpr int kMaxSources = 8;  // of the partials of an item: parts of k of all ranks

struct alignas(16) ReadyWord {
  uint64_t output;  // address of the output that the peer's kernel of `epoch` may be sent
  uint64_t epoch;
};

struct ControlBlock {
  // Counters of one launch: the work and the roles that are still to be given out.
  alignas(128) uint32_t next_item;
  alignas(128) uint32_t next_unit;
  alignas(128) uint32_t next_cta;
  alignas(128) uint32_t exited;
  uint32_t failed;        // 1 once a wait has passed its deadline
  uint64_t epoch;         // launches that have ended on this rank: in step on all ranks
  uint64_t arrived_base;  // `arrived` at the end of the last launch

  alignas(128) ReadyWord ready[kMaxRanks];  // by peer
  alignas(128) uint64_t arrived;

  // Behind the block in memory lie max_slots rows of flags, by slot and source: the epoch in which
  // that partial (or, with AllGather, that piece of rows) has arrived.
  ENTWINE_HOST_DEVICE uint64_t* tile_ready(int slot, int source) {
    return reinterpret_cast<uint64_t*>(this + 1) + slot * kMaxSources + source;
  }
  ENTWINE_HOST_DEVICE uint64_t* rows_ready(int piece, int source) {
    return tile_ready(piece, source);
  }
  // Then, by piece of this rank's rows: units of it that have been sent; 0 between launches.
  ENTWINE_HOST_DEVICE uint32_t* units_sent(int piece, int max_slots) {
    return reinterpret_cast<uint32_t*>(tile_ready(max_slots, 0)) + piece;
  }

  static size_t bytes_behind(int max_slots) {
    return max_slots * (kMaxSources * sizeof(uint64_t) + sizeof(uint32_t));
  }
};

enum class Dtype { kBfloat16, kFloat16 };

// The call that a launch is a part of, for the words of a wait that fails: sizes of the product on one
// rank.
struct CallName {
  Op op;
  Dtype dtype;
  int m, n, k;
};

// What a wait that passed its deadline leaves in pinned host memory. Written once.
struct WaitFailure {
  uint32_t kind;  // WaitKind; 0: nothing failed
  int32_t rank;
  int32_t peer;
  int32_t tile;  // the slot of an item, or a tile row of the peer; -1: neither
  uint64_t expected;
  uint64_t seen;
  CallName call;
};

enum WaitKind : uint32_t {
  kWaitNone = 0,
  kWaitTileReady = 1,
  kWaitPeerReady = 2,
  kWaitArrived = 3,
  kWaitBarrier = 4,
  kWaitRowsReady = 5,
};

// The addresses of all ranks' shared memory, as seen from one of them.
struct PeerWindow {
  int rank;
  int num_ranks;
  ControlBlock* control[kMaxRanks];
  unsigned char* slots[kMaxRanks];
  size_t parity_bytes;   // the slots of one parity; two lie behind each other
  int max_slots;         // rows of flags in a control block
  WaitFailure* failure;  // pinned host memory of this rank
  uint64_t deadline_ns;
  CallName call;
};

}  // namespace entwine
