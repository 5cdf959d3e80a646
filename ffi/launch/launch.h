// Host side of a launch of the fused kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "peer/control_block.h"

namespace entwine {

enum class Dtype { kBfloat16, kFloat16 };

// The run-time copy of entwine_jax.schedule.Schedule.
struct Schedule {
  int64_t tile_m;
  int64_t tile_n;
  int64_t num_comm_ctas;
  int64_t num_spare_warps;
  int64_t raster;
  int64_t push_spread;
  int64_t rows_per_launch;  // 0: all rows in one launch
};

// x [m, k], w [k, n], output [m, n], all row-major and 16-byte aligned; n and k multiples of 8.
struct Operands {
  const void* x;
  const void* w;
  void* output;
  Dtype dtype;
  int64_t m, n, k;
};

// Thrown for a call that the kernel must not be launched with: it would corrupt memory or never
// end.
class InvalidCall : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

void check_cuda(cudaError_t error, const std::string& what);

// Loads every kernel on the current device, so that no launch has to while another kernel spins.
void load_kernels();

// Enqueues out = sum over ranks of x @ w, as several launches where schedule.rows_per_launch says
// so. `num_ctas` is the size of the grid (the SMs of the device, unless ranks share it). Each
// launch is one epoch: every rank of the group has to make the same calls in the same order.
void launch_matmul_allreduce(const Operands& operands, const Schedule& schedule,
                             const PeerWindow& window, int num_ctas, cudaStream_t stream);

}  // namespace entwine
