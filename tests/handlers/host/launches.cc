#include "launches.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "cuda_runtime_api.h"
#include "launch/instance.h"
#include "machine.h"

namespace {

std::mutex mutex;
std::vector<std::string> lines;
std::map<int, entwine::PeerWindow> last_windows;

}  // namespace

namespace entwine {
namespace {

std::set<int> loaded;  // devices that have the kernels

void load() {
  int device = -1;
  cudaGetDevice(&device);
  if (machine::fails("load", device)) throw std::runtime_error("loading the fused kernel");
  const std::lock_guard lock(mutex);
  loaded.insert(device);
}

// Clear to begin with; slots of NaNs.
bool is_ready(const PeerWindow& window) {
  const ControlBlock& own = *window.control[window.rank];
  const auto* words = reinterpret_cast<const unsigned char*>(&own);
  return std::all_of(words, words + sizeof(own), [](unsigned char byte) { return byte == 0; }) &&
         window.slots[window.rank][0] == 0xff && window.failure->kind == kWaitNone;
}

void launch(const Call& call, const RowBlocks&, const Schedule& s, const PeerWindow& window,
            int num_ctas, cudaStream_t stream) {
  int device = -1;
  cudaGetDevice(&device);
  const auto owners = [&](const auto& addresses) {
    std::string text;
    for (int peer = 0; peer < window.num_ranks; peer++) {
      text += (peer == 0 ? "" : ",") + std::to_string(machine::owner(addresses[peer]));
    }
    return text;
  };
  std::string reached;
  for (int peer = 0; peer < window.num_ranks; peer++) {
    reached += machine::reaches(device, machine::owner(window.control[peer])) ? '1' : '0';
  }
  std::ostringstream line;
  const auto word = [&](const char* name, auto value) { line << name << '=' << value << ' '; };
  word("device", device);
  word("own_stream", stream == machine::stream_of(device));
  word("op", static_cast<int>(call.op));
  word("float16", call.dtype == Dtype::kFloat16);
  word("w_transposed", call.w_transposed);
  for (const auto& [name, address] : {std::pair<const char*, const void*>{"x", call.x},
                                      {"w", call.w},
                                      {"output", call.output},
                                      {"gathered", call.gathered}}) {
    word(name, address == nullptr ? -1 : *static_cast<const int64_t*>(address));
  }
  for (const auto& [name, value] :
       {std::pair{"m", call.m}, {"n", call.n}, {"k", call.k}, {"num_batches", call.num_batches}}) {
    word(name, value);
  }
  for (const auto& [name, value] : {std::pair{"tile_m", s.tile_m},
                                    {"tile_n", s.tile_n},
                                    {"num_comm_ctas", s.num_comm_ctas},
                                    {"num_senders", s.num_senders},
                                    {"num_spare_warps", s.num_spare_warps},
                                    {"raster", s.raster},
                                    {"push_spread", s.push_spread},
                                    {"narrow_tail", s.narrow_tail},
                                    {"split_k", s.split_k},
                                    {"rows_per_launch", s.rows_per_launch}}) {
    word(name, value);
  }
  word("num_ctas", num_ctas);
  word("rank", window.rank);
  word("num_ranks", window.num_ranks);
  word("control", owners(window.control));
  word("slots", owners(window.slots));
  word("failure", machine::owner(window.failure));
  word("reached", reached);
  word("ready", is_ready(window));
  word("max_slots", window.max_slots);
  word("parity_bytes", window.parity_bytes);
  word("deadline_ns", window.deadline_ns);
  const std::lock_guard lock(mutex);
  word("loaded", loaded.contains(device));
  lines.push_back(line.str());
  last_windows[device] = window;
}

constexpr Instances instances_of(Dtype dtype, bool w_transposed) {
  Instances instances{};
  for (const Op op : {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather}) {
    instances[static_cast<int>(op)] = {op, dtype, w_transposed, false, load, launch};
  }
  return instances;
}

}  // namespace

const Instances kBfloat16 = instances_of(Dtype::kBfloat16, false),
                kBfloat16Transposed = instances_of(Dtype::kBfloat16, true),
                kFloat16 = instances_of(Dtype::kFloat16, false),
                kFloat16Transposed = instances_of(Dtype::kFloat16, true), kTraced = kBfloat16;

}  // namespace entwine

namespace launches {

std::vector<std::string> taken() {
  const std::lock_guard lock(mutex);
  return std::exchange(lines, {});
}

void fail_last(int device, int peer) {
  const std::lock_guard lock(mutex);
  const entwine::PeerWindow& window = last_windows.at(device);
  entwine::WaitFailure& failure = *window.failure;
  failure.rank = window.rank;
  failure.peer = peer;
  failure.expected = 7;
  failure.seen = 6;
  failure.call = window.call;
  std::atomic_ref(failure.kind).store(entwine::kWaitPeerReady, std::memory_order_release);
}

}  // namespace launches
