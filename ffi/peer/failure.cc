#include "peer/failure.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>

#include "peer/workspace.h"

namespace entwine {
namespace {

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "matmul_allreduce";
    case Op::kReduceScatter:
      return "matmul_reducescatter";
    default:
      return "allgather_matmul";
  }
}

// Sizes as the rank sees them: x is [m, k] (AllGather: once it is gathered), w is [k, n].
std::string in_words(const CallName& call) {
  return std::string(name_of(call.op)) + " of m=" + std::to_string(call.m) +
         ", n=" + std::to_string(call.n) + ", k=" + std::to_string(call.k) + " in " +
         (call.dtype == Dtype::kFloat16 ? "float16" : "bfloat16");
}

// "Rank 1", "Rank 1 or 2"; "A rank" if it is not known which.
std::string one_of(const std::vector<int>& ranks) {
  if (ranks.empty()) return "A rank";
  std::string words = "Rank " + std::to_string(ranks[0]);
  for (size_t i = 1; i < ranks.size(); i++) words += " or " + std::to_string(ranks[i]);
  return words;
}

}  // namespace

bool has_failed(const WaitFailure& failure) {
  auto& kind = const_cast<uint32_t&>(failure.kind);
  return std::atomic_ref(kind).load(std::memory_order_acquire) != kWaitNone;
}

std::string describe(const WaitFailure& failure, const std::vector<int>& silent) {
  if (!has_failed(failure)) return "";
  const std::string rank = "rank " + std::to_string(failure.rank);
  const std::string peer = "rank " + std::to_string(failure.peer);
  std::string what, counted = "epoch";
  switch (failure.kind) {
    case kWaitTileReady:
      what = "waited for the partial of tile " + std::to_string(failure.tile) + " from " + peer;
      break;
    case kWaitRowsReady:
      what = "waited for tile row " + std::to_string(failure.tile) + " from " + peer;
      break;
    case kWaitPeerReady:
      what = "waited for " + peer + " to start the same call";
      break;
    case kWaitArrived:
      what = "waited for its output to be complete";
      counted = "units";
      break;
    default:
      what = "waited for a warp of its own";
      counted = "phase";
      break;
  }
  return in_words(failure.call) + ": " + rank + " " + what + " past the deadline (" + counted +
         " " + std::to_string(failure.expected) + " expected, " + std::to_string(failure.seen) +
         " seen). " + one_of(silent) +
         " did not arrive or arrived too late; the deadline is ENTWINE_JAX_DEADLINE_SECONDS, and "
         "ENTWINE_JAX_DISABLE=1 runs everything as plain lax.";
}

void watch_for_failures() {
  static std::once_flag started;
  std::call_once(started, [] {
    std::thread([] {
      const auto rest = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
      while (last_failure().empty()) rest(50);
      rest(50);  // until the other ranks have recorded theirs
      std::fprintf(stderr, "entwine_jax: %s\n", last_failure().c_str());
    }).detach();
  });
}

}  // namespace entwine
