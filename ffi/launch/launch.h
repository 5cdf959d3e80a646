// Host side of a launch of the fused kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/tile_order.cuh"
#include "launch/trace.h"
#include "peer/control_block.h"

namespace entwine {

// The run-time copy of entwine_jax.schedule.Schedule.
struct Schedule {
  int64_t tile_m;
  int64_t tile_n;
  int64_t num_comm_ctas;
  int64_t num_senders;  // AllGather: CTAs that send beside computing, 0 for half of them
  int64_t num_spare_warps;
  int64_t raster;
  int64_t push_spread;
  int64_t narrow_tail;
  int64_t split_k;
  // Of one rank, with every batch rounded up to whole tiles: a launch takes whole batches, or rows of
  // one batch where a batch has more. 0: all rows in one launch.
  int64_t rows_per_launch;
};

// One call on one rank. All arrays are row-major and 16-byte aligned; n and k are multiples of 8.
//
//                 x               w        output          gathered
// AllReduce       [m, k]          [k, n]   [m, n]
// ReduceScatter   [m, k]          [k, n]   [m / P, n]
// AllGather       [m / P, k]      [k, n]   [m, n]          [m, k]
//
// An AllGather of one rank gathers nothing: it is the matmul alone, and leaves `gathered` as it is.
// Rows of the arrays with m rows are [num_batches, num_ranks, block_rows] (AllReduce: m rows, one
// batch), of those with m / P rows [num_batches, block_rows]. If w_transposed, w is [n, k].
struct Call {
  Op op;
  Dtype dtype;
  const void* x;
  const void* w;
  void* output;
  void* gathered;
  int64_t m, n, k;
  int64_t num_batches;
  bool w_transposed;
  TraceBuffer trace{};  // events == nullptr: nothing is recorded
};

// Thrown for a call that the kernel must not be launched with: it would corrupt memory or never end.
class InvalidCall : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

void check_cuda(cudaError_t error, const std::string& what);

// Loads every kernel on the current device, so that no launch has to while another kernel spins.
void load_kernels();

// Enqueues the call, as several launches where schedule.rows_per_launch says so. `num_ctas` is the size
// of the grid (the SMs of the device, unless ranks share it). Each launch is one epoch: every rank of
// the group has to make the same calls in the same order. window.call is set here.
void launch_call(const Call& call, const Schedule& schedule, PeerWindow window, int num_ctas,
                 cudaStream_t stream);

}  // namespace entwine
