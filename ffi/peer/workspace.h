// The workspaces of this process: one per rank and device group, made on first use and kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "peer/control_block.h"
#include "peer/exchange.h"

namespace entwine {

struct WorkspaceLimits {
  double deadline_seconds = 10.0;
  size_t workspace_bytes = size_t{512} << 20;  // slots of all groups together, per device
};

// The slots of one group: half of what a device gives, so that two groups (two axes of a mesh) fit.
size_t slot_bytes_per_group(const WorkspaceLimits& limits);

struct WorkspaceInfo {
  int device, rank, num_ranks;
  size_t slot_bytes, control_bytes;
};

struct Workspace {
  PeerWindow window;
  int num_sms;
};

void configure_workspaces(const WorkspaceLimits& limits);  // for those made afterwards
WorkspaceLimits workspace_limits();

// The workspace known under `key` (the communicator of one rank of a group). Null if there is none.
const Workspace* find_workspace(const void* key);

// Makes it. Collective over the group: every rank calls this for its own key, and either all succeed
// or all throw. The current device is the rank's.
const Workspace& make_workspace(const void* key, Exchange& exchange);

std::vector<WorkspaceInfo> workspace_report();
std::string last_failure();  // of any rank of this process, in words; "" if none

// Waits for the devices and frees everything. Nothing may use a workspace afterwards.
void release_workspaces();

}  // namespace entwine
