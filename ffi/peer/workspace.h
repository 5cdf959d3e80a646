// The workspaces of this process: one for each rank of a group and share of the memory, made on first use
// and kept.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "peer/control_block.h"
#include "peer/exchange.h"

namespace entwine {

struct WorkspaceInfo {
  int device, rank, num_ranks;
  size_t slot_bytes, control_bytes;
};

struct Workspace {
  PeerWindow window;
  int device;
  int num_sms;
};

// The longest wait in a kernel, for launches from now on.
void set_deadline(double seconds);
uint64_t deadline_ns();

// One rank's place in a group, with so many bytes of slots: programs that were lowered with other shares
// of the memory may use the same communicator.
struct WorkspaceKey {
  const void* communicator;
  size_t slot_bytes;

  auto operator<=>(const WorkspaceKey&) const = default;
};

// Null if there is none.
const Workspace* find_workspace(const WorkspaceKey& key);

// Another rank of the group has failed, and knows more.
class PeerFailed : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Makes the workspace. Collective over the group: every rank calls this with its own communicator, and
// either all succeed or all throw. The current device is the rank's. Workspaces live as long as the
// process, since launched programs may use them at any time.
void make_workspace(const WorkspaceKey& key, Exchange& exchange);

std::vector<WorkspaceInfo> workspace_report();

// The failed wait of any rank of this process, in words; "" if there is none.
std::string last_failure();

}  // namespace entwine
