// Launches the fused kernel for any number of ranks on any number of GPUs, without XLA: several
// ranks may share a GPU, each with a part of its CTAs, its own buffers and its own stream. For
// tests (more ranks than GPUs, few resident CTAs) and for timing schedules without compiling a
// program for each.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "launch/launch.h"

namespace entwine {

// m, n, k: of the product on one rank (launch/launch.h).
struct VirtualProblem {
  Op op;
  int64_t m, n, k;
  int64_t num_batches;
  bool w_transposed;
  Schedule schedule;
};

struct VirtualRanksRequest {
  std::vector<VirtualProblem> problems;  // the calls take them in turn, in one workspace
  int num_ranks;
  std::vector<int> devices;  // rank r runs on devices[r % devices.size()]
  Dtype dtype;
  int num_ctas;         // grid of each rank; ranks that share a GPU must all fit on it
  int resident_ctas;    // > 0: so many SMs of a GPU are free, the others are held by another kernel
  int held_devices;     // > 0: of so many GPUs only, the first ones
  int num_calls;        // verified calls, back to back
  int num_timed_calls;  // of the one problem, behind as many that are not timed
  int late_ms;          // the last rank's kernels are enqueued so much later
  int missing_rank;     // >= 0: this rank launches nothing (the others must end in an error)
  uint64_t seed;
  double deadline_seconds;
  int num_traced_calls;  // recorded behind the timed ones, each behind some that are not
};

struct VirtualRanksResult {
  int64_t
      wrong_elements;  // of all outputs: not the rank-order float32 sum of the partials, bitwise
  int64_t wrong_partials;  // of sampled elements of a rank's own product: off against float64
  double microseconds;     // a call of the one problem, slowest rank; 0 if not timed
  // By traced call; of all ranks, by the clock of rank 0.
  std::vector<std::vector<TraceEvent>> events;
};

VirtualRanksResult run_virtual_ranks(const VirtualRanksRequest& request);

// Times calls of one problem with one schedule after the other, on operands that stay: between two
// schedules the GPUs idle for less than a millisecond, and so stay at the clock of sustained work.
// For one thread.
class TimedRanks {
 public:
  explicit TimedRanks(VirtualRanksRequest request);
  ~TimedRanks();
  // Time of one of `num_calls` calls that follow as many others, slowest rank. The problem's own schedule
  // plays no part.
  double microseconds(const Schedule& schedule, int num_calls);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace entwine
