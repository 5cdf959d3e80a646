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

}  // namespace

std::string describe(const WaitFailure& failure) {
  const auto kind =
      std::atomic_ref(const_cast<uint32_t&>(failure.kind)).load(std::memory_order_acquire);
  if (kind == kWaitNone) return "";
  const std::string rank = "rank " + std::to_string(failure.rank);
  const std::string peer = "rank " + std::to_string(failure.peer);
  std::string what, counted = "epoch";
  switch (kind) {
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
         " seen). A rank did not arrive or arrived too late; the deadline is "
         "ENTWINE_JAX_DEADLINE_SECONDS, and ENTWINE_JAX_DISABLE=1 runs everything as plain lax.";
}

void watch_for_failures() {
  static std::once_flag started;
  std::call_once(started, [] {
    std::thread([] {
      std::string message;
      while ((message = last_failure()).empty()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      std::fprintf(stderr, "entwine_jax: %s\n", message.c_str());
    }).detach();
  });
}

}  // namespace entwine
