// The device memory that one rank shares with its group, and the record its kernel leaves on
// failure.
#pragma once

#include <cstddef>

#include "peer/control_block.h"

namespace entwine {

// Lets the current device read and write the memory of `peer`.
void enable_peer_access(int peer);

// Owns the memory; frees it on destruction. Made on the current device.
class RankMemory {
 public:
  // `slot_bytes`: both parities together. Control words start at zero, slots are poisoned with NaNs
  // so that a read before the write cannot pass unseen.
  explicit RankMemory(size_t slot_bytes);
  ~RankMemory();
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  ControlBlock* control() const { return control_; }
  unsigned char* slots() const { return slots_; }
  WaitFailure* failure() const { return failure_; }
  size_t slot_bytes() const { return slot_bytes_; }
  size_t control_bytes() const;
  int max_slots() const;
  int device() const { return device_; }

 private:
  void release();

  int device_ = 0;
  size_t slot_bytes_;
  ControlBlock* control_ = nullptr;
  unsigned char* slots_ = nullptr;
  WaitFailure* failure_ = nullptr;
};

}  // namespace entwine
