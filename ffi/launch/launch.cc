#include "launch/launch.h"

#include <algorithm>
#include <array>

#include "launch/instance.h"

namespace entwine {
namespace {

const std::array<const Instance*, 4>& instances() {
  static const std::array<const Instance*, 4> table{&kBfloat16Tile256, &kBfloat16Tile128,
                                                    &kFloat16Tile256, &kFloat16Tile128};
  return table;
}

const Instance& find_instance(Dtype dtype, const Schedule& schedule) {
  for (const Instance* instance : instances()) {
    if (instance->dtype == dtype && instance->tile_m == schedule.tile_m &&
        instance->tile_n == schedule.tile_n) {
      return *instance;
    }
  }
  throw InvalidCall("schedule: there is no kernel with tile_m=" + std::to_string(schedule.tile_m) +
                    ", tile_n=" + std::to_string(schedule.tile_n));
}

void require(bool holds, const char* name, int64_t value, const std::string& rule) {
  if (!holds) throw InvalidCall(std::string(name) + "=" + std::to_string(value) + ": " + rule);
}

// What Python has checked already and what would corrupt memory or hang if it were wrong.
void check_call(const Operands& operands, const Schedule& schedule, const PeerWindow& window,
                const Instance& instance, int num_ctas) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  require(operands.m >= 1 && operands.m < kMaxSize, "m", operands.m, "must be in [1, 2^30)");
  require(operands.n >= 8 && operands.n % 8 == 0 && operands.n < kMaxSize, "n", operands.n,
          "must be a positive multiple of 8");
  require(operands.k >= 8 && operands.k % 8 == 0 && operands.k < kMaxSize, "k", operands.k,
          "must be a positive multiple of 8");
  require(window.num_ranks >= 1 && window.num_ranks <= kMaxRanks, "num_ranks", window.num_ranks,
          "must be in 1..8");
  require(schedule.raster >= 1 && schedule.raster < kMaxSize &&
              schedule.raster * ((operands.n + schedule.tile_n - 1) / schedule.tile_n) < kMaxSize,
          "schedule.raster", schedule.raster, "a band must have 1 to 2^30 tiles");
  require(schedule.num_spare_warps >= 0 && schedule.num_spare_warps <= 2,
          "schedule.num_spare_warps", schedule.num_spare_warps, "must be in 0..2");
  require(schedule.num_comm_ctas >= 0 && schedule.num_comm_ctas < num_ctas,
          "schedule.num_comm_ctas", schedule.num_comm_ctas,
          "must leave a CTA of " + std::to_string(num_ctas) + " that computes");
  require(schedule.push_spread >= 0 && schedule.push_spread <= 100, "schedule.push_spread",
          schedule.push_spread, "must be in 0..100");
  require(schedule.rows_per_launch >= 0 && schedule.rows_per_launch % schedule.tile_m == 0,
          "schedule.rows_per_launch", schedule.rows_per_launch, "must be a multiple of tile_m");
  for (const void* pointer : {operands.x, operands.w, const_cast<const void*>(operands.output)}) {
    require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "operand address",
            static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)), "must be 16-byte aligned");
  }

  const int64_t rows =
      schedule.rows_per_launch == 0 ? operands.m : std::min(operands.m, schedule.rows_per_launch);
  const int64_t num_tiles = (rows + instance.tile_m - 1) / instance.tile_m *
                            ((operands.n + instance.tile_n - 1) / instance.tile_n);
  const int64_t slots_per_source = (num_tiles + window.num_ranks - 1) / window.num_ranks;
  require(slots_per_source * window.num_ranks * instance.tile_bytes <=
                  static_cast<int64_t>(window.parity_bytes) &&
              slots_per_source <= window.max_owned_tiles,
          "schedule.rows_per_launch", schedule.rows_per_launch,
          "the slots of one launch do not fit into the workspace of " +
              std::to_string(2 * window.parity_bytes) + " bytes");
}

}  // namespace

void check_cuda(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // taken: no later call shall report it again
    throw std::runtime_error(what + ": " + cudaGetErrorString(error));
  }
}

void load_kernels() {
  for (const Instance* instance : instances()) instance->load();
}

void launch_matmul_allreduce(const Operands& operands, const Schedule& schedule,
                             const PeerWindow& window, int num_ctas, cudaStream_t stream) {
  const Instance& instance = find_instance(operands.dtype, schedule);
  check_call(operands, schedule, window, instance, num_ctas);
  constexpr int64_t kElementBytes = 2;
  const int64_t step = schedule.rows_per_launch == 0 ? operands.m : schedule.rows_per_launch;
  for (int64_t row = 0; row < operands.m; row += step) {
    Operands part = operands;
    part.x = static_cast<const char*>(operands.x) + row * operands.k * kElementBytes;
    part.output = static_cast<char*>(operands.output) + row * operands.n * kElementBytes;
    part.m = std::min(step, operands.m - row);
    instance.launch(part, schedule, window, num_ctas, stream);
  }
}

}  // namespace entwine
