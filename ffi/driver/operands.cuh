// The operands and results of one problem on one rank.
#pragma once

#include <cstdint>
#include <memory>

#include "driver/checks.cuh"
#include "driver/device_buffer.h"
#include "driver/virtual_ranks.h"

namespace entwine {

// Calls take these in turn: three sets over two parities of slots, so that stale slots cannot pass unseen.
constexpr int kNumSets = 3;

inline bool gathers(const VirtualProblem& problem) { return problem.op == Op::kAllGather; }

// Rows of x, of the output, and of a block (launch/launch.h).
inline int64_t x_rows(const VirtualProblem& problem, int num_ranks) {
  return gathers(problem) ? problem.m / num_ranks : problem.m;
}
inline int64_t output_rows(const VirtualProblem& problem, int num_ranks) {
  return problem.op == Op::kReduceScatter ? problem.m / num_ranks : problem.m;
}
inline int64_t block_rows(const VirtualProblem& problem, int num_ranks) {
  return problem.m / problem.num_batches / num_ranks;
}

template <class Element>
std::unique_ptr<DeviceBuffer> make_array(size_t num_elements) {
  return std::make_unique<DeviceBuffer>(num_elements * sizeof(Element));
}

struct Operands {
  std::unique_ptr<DeviceBuffer> w, x[kNumSets], output[kNumSets], gathered[kNumSets];

  Call call(const VirtualProblem& problem, Dtype dtype, int set) const {
    return {problem.op,
            dtype,
            x[set]->as<void>(),
            w->as<void>(),
            output[set]->as<void>(),
            gathers(problem) ? gathered[set]->as<void>() : nullptr,
            problem.m,
            problem.n,
            problem.k,
            problem.num_batches,
            problem.w_transposed};
  }
};

// On the current device, with random x and w.
template <class Element>
Operands make_operands(const VirtualProblem& problem, int num_ranks, uint64_t seed) {
  const size_t x_size = x_rows(problem, num_ranks) * problem.k, w_size = problem.k * problem.n;
  Operands operands;
  operands.w = make_array<Element>(w_size);
  fill_random<<<kBlocks, kThreads>>>(operands.w->template as<Element>(), w_size, seed, 0.25f);
  for (int set = 0; set < kNumSets; set++) {
    operands.x[set] = make_array<Element>(x_size);
    fill_random<<<kBlocks, kThreads>>>(operands.x[set]->template as<Element>(), x_size,
                                       seed + 100000 * (set + 1), 2.0f);
    operands.output[set] = make_array<Element>(output_rows(problem, num_ranks) * problem.n);
    if (gathers(problem)) {
      operands.gathered[set] = make_array<Element>(problem.m * problem.k);
    }
  }
  return operands;
}

}  // namespace entwine
