// What a traced launch leaves behind: one event for each thing that a warp did. The instances that
// record are compiled beside the others; those others carry nothing of it.
#pragma once

#include <cstdint>

namespace entwine {

enum class TraceKind : uint8_t {
  kMainloop = 0,  // math warps multiply an item
  kEpilogue = 1,  // they write it to the store buffer
  kPush = 2,      // from the first store of an item until all of it is in the owner's memory
  kWait = 3,      // for the partials of an item that is to be reduced
  kReduce = 4,    // load, sum and forward one unit
  kSend = 5,      // AllGather: one unit of this rank's rows
  kWaitRows = 6,  // AllGather: for a piece of another rank's rows
  kFinish = 7,    // for the rest of the output, by the last CTA
  kPace = 8,      // a push waits for its turn
  kCta = 9,       // the whole CTA
};

// entwine_jax/trace/events.py reads these 32 bytes.
struct TraceEvent {
  uint64_t start_ns, end_ns;  // of this GPU's clock
  // The item, by the count of its CTA (mainloop, epilogue) or by its slot (push, wait, reduce, pace);
  // the tile row (send, wait for rows); -1: none.
  int32_t tile;
  uint16_t rank, cta;
  uint8_t warp;
  TraceKind kind;
  uint16_t unused[3];
};
static_assert(sizeof(TraceEvent) == 32);

// In device memory. Events past the capacity are counted, not kept.
struct TraceBuffer {
  TraceEvent* events;
  uint32_t* num_events;
  uint32_t capacity;
};

}  // namespace entwine
