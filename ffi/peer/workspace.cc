#include "peer/workspace.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "launch/launch.h"
#include "peer/failure.h"
#include "peer/rank_memory.h"

namespace entwine {
namespace {

struct Entry {
  std::unique_ptr<RankMemory> memory;
  Workspace workspace;
};

struct Registry {
  std::mutex mutex;  // held for look-ups and insertions only, never across a launch or an exchange
  std::atomic<uint64_t> deadline_ns{10'000'000'000};
  std::map<WorkspaceKey, Entry> entries;
};

// Never destroyed: its memory is CUDA's, which may be gone when static objects are.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

// What a rank tells the others.
struct Introduction {
  int64_t process;
  int64_t device;
  ControlBlock* control;  // null: this rank could not get its memory
  unsigned char* slots;
  size_t slot_bytes;
};

// What one rank can do alone, with the thread that will watch over it. What fails is told to the others.
std::string allocate(size_t slot_bytes, Entry& entry) {
  try {
    Workspace& workspace = entry.workspace;
    check_cuda(cudaGetDevice(&workspace.device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&workspace.num_sms, cudaDevAttrMultiProcessorCount,
                                      workspace.device),
               "asking for the number of SMs");
    watch_for_failures();
    entry.memory = std::make_unique<RankMemory>(slot_bytes);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

void set_deadline(double seconds) {
  if (!(seconds >= 1e-3 && seconds <= 1e6)) {
    throw InvalidCall("seconds=" + std::to_string(seconds) + ": must be in 0.001..1e6");
  }
  registry().deadline_ns.store(static_cast<uint64_t>(seconds * 1e9));
}

uint64_t deadline_ns() { return registry().deadline_ns.load(); }

const Workspace* find_workspace(const WorkspaceKey& key) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(key);
  return found == registry().entries.end() ? nullptr : &found->second.workspace;
}

void make_workspace(const WorkspaceKey& key, Exchange& exchange) {
  const int rank = exchange.rank(), num_ranks = exchange.num_ranks();
  if (num_ranks > kMaxRanks) {
    throw InvalidCall("num_ranks=" + std::to_string(num_ranks) + ": at most 8 are supported");
  }
  Entry entry;
  std::string problem = allocate(key.slot_bytes, entry);

  // A rank without memory still takes part, or the others would wait for it.
  Introduction mine{getpid(), -1, nullptr, nullptr, 0};
  if (entry.memory != nullptr) {
    mine = {getpid(), entry.memory->device(), entry.memory->control(), entry.memory->slots(),
            entry.memory->slot_bytes()};
  }
  Introduction all[kMaxRanks];
  exchange.all_gather(&mine, all, sizeof(Introduction));

  bool peer_failed = false;
  PeerWindow& window = entry.workspace.window;
  window.rank = rank;
  window.num_ranks = num_ranks;
  for (int peer = 0; peer < num_ranks; peer++) {
    const Introduction& other = all[peer];
    const std::string name = "rank " + std::to_string(peer);
    if (!problem.empty()) break;
    if (other.control == nullptr) {
      problem = name + " could not get its workspace";
      peer_failed = true;
    } else if (other.process != mine.process) {
      problem = name + " is in another process";
    } else if (other.slot_bytes != mine.slot_bytes) {
      problem = name + " has a workspace of another size";
    }
    window.control[peer] = other.control;
    window.slots[peer] = other.slots;
    if (problem.empty() && other.device != mine.device) {
      try {
        enable_peer_access(static_cast<int>(other.device));
      } catch (const std::exception& error) {
        problem = error.what();
      }
    }
  }
  // All or none: a rank that went on alone would wait for the others in its kernel.
  int64_t bad = problem.empty() ? 0 : 1, bads[kMaxRanks];
  exchange.all_gather(&bad, bads, sizeof(bad));
  for (int peer = 0; peer < num_ranks && problem.empty(); peer++) {
    if (bads[peer] == 0) continue;
    problem = "rank " + std::to_string(peer) + " could not be set up";
    peer_failed = true;
  }
  if (!problem.empty()) {
    const std::string words = "no workspace for rank " + std::to_string(rank) + ": " + problem +
                              ". ENTWINE_JAX_DISABLE=1 runs everything as plain lax.";
    if (peer_failed) throw PeerFailed(words);
    throw std::runtime_error(words);
  }

  window.parity_bytes = entry.memory->slot_bytes() / 2;
  window.max_slots = entry.memory->max_slots();
  window.failure = entry.memory->failure();
  const std::lock_guard lock(registry().mutex);
  registry().entries.insert_or_assign(key, std::move(entry));
}

std::vector<WorkspaceInfo> workspace_report() {
  const std::lock_guard lock(registry().mutex);
  std::vector<WorkspaceInfo> report;
  for (const auto& [key, entry] : registry().entries) {
    report.push_back({entry.memory->device(), entry.workspace.window.rank,
                      entry.workspace.window.num_ranks, entry.memory->slot_bytes(),
                      entry.memory->control_bytes()});
  }
  return report;
}

std::string last_failure() {
  const std::lock_guard lock(registry().mutex);
  const auto& entries = registry().entries;
  const auto failed = [&](const ControlBlock* control) {
    return std::ranges::any_of(entries, [&](const auto& keyed) {
      const RankMemory& memory = *keyed.second.memory;
      return memory.control() == control && has_failed(*memory.failure());
    });
  };
  for (const auto& [key, entry] : entries) {
    const PeerWindow& window = entry.workspace.window;
    if (!has_failed(*window.failure)) continue;
    std::vector<int> silent;
    for (int peer = 0; peer < window.num_ranks; peer++) {
      if (!failed(window.control[peer])) silent.push_back(peer);
    }
    return describe(*window.failure, silent);
  }
  return "";
}

}  // namespace entwine
