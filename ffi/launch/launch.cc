#include "launch/launch.h"

#include <algorithm>
#include <array>

#include "launch/instance.h"
#include "launch/item_layout.h"

namespace entwine {
namespace {

constexpr std::array kAllInstances{&kBfloat16, &kBfloat16Transposed, &kFloat16, &kFloat16Transposed,
                                   &kTraced};

const Instance& find_instance(const Call& call) {
  for (const Instances* instances : kAllInstances) {
    for (const Instance& instance : *instances) {
      if (instance.op == call.op && instance.dtype == call.dtype &&
          instance.w_transposed == call.w_transposed &&
          instance.traced == (call.trace.events != nullptr)) {
        return instance;
      }
    }
  }
  throw InvalidCall("trace: only bfloat16 calls with w as [k, n] can be traced");
}

void require(bool holds, const char* name, int64_t value, const std::string& rule) {
  if (!holds) throw InvalidCall(std::string(name) + "=" + std::to_string(value) + ": " + rule);
}

constexpr int64_t kMaxSize = int64_t{1} << 30;

int64_t blocks_of_a_batch(Op op, int num_ranks) { return op == Op::kAllReduce ? 1 : num_ranks; }

void check_sizes(const Call& call, const PeerWindow& window) {
  require(window.num_ranks >= 1 && window.num_ranks <= kMaxRanks, "num_ranks", window.num_ranks,
          "must be in 1..8");
  require(call.m >= 1 && call.m < kMaxSize, "m", call.m, "must be in [1, 2^30)");
  for (const auto& [name, size] : {std::pair{"n", call.n}, std::pair{"k", call.k}}) {
    require(size >= 8 && size % 8 == 0 && size < kMaxSize, name, size,
            "must be a positive multiple of 8 below 2^30");
  }
  const int64_t num_blocks = blocks_of_a_batch(call.op, window.num_ranks);
  require(call.num_batches >= 1 && call.num_batches < kMaxSize &&
              call.m % (call.num_batches * num_blocks) == 0,
          "num_batches", call.num_batches, "must divide the rows of a rank");
  require(call.op != Op::kAllReduce || call.num_batches == 1, "num_batches", call.num_batches,
          "AllReduce has one batch of rows");
  require(call.op != Op::kAllGather || call.gathered != nullptr, "gathered", 0, "is missing");
  for (const void* pointer : {call.x, call.w, const_cast<const void*>(call.output),
                              const_cast<const void*>(call.gathered)}) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    require(address % 16 == 0, "operand address", static_cast<int64_t>(address),
            "must be 16-byte aligned");
  }
}

void check_schedule(const Call& call, const Schedule& schedule, int num_ranks, int num_ctas) {
  require(schedule.tile_m == 128, "schedule.tile_m", schedule.tile_m, "must be 128");
  require(schedule.tile_n == 128 || schedule.tile_n == 256, "schedule.tile_n", schedule.tile_n,
          "must be 128 or 256");
  require(schedule.narrow_tail >= 0 && schedule.narrow_tail < kMaxSize &&
              (schedule.narrow_tail == 0 || (schedule.tile_n == 256 && call.op != Op::kAllGather)),
          "schedule.narrow_tail", schedule.narrow_tail,
          "must be in [0, 2^30), and 0 with tiles of 128 columns and for AllGather");
  require(schedule.split_k >= 1 && schedule.split_k <= kMaxSources / num_ranks &&
              (schedule.split_k == 1 || call.op != Op::kAllGather),
          "schedule.split_k", schedule.split_k,
          "must be in 1.." + std::to_string(kMaxSources / num_ranks) + ", and 1 for AllGather");
  require(schedule.raster >= 1 && schedule.raster < kMaxSize &&
              schedule.raster * ((call.n + schedule.tile_n - 1) / schedule.tile_n) < kMaxSize,
          "schedule.raster", schedule.raster, "a band must have 1 to 2^30 tiles");
  // AllGather's tiles wait for peers, so its rows are sent by warps of the very CTAs that wait.
  const bool gathers = call.op == Op::kAllGather;
  const int fewest_spare_warps = gathers ? 1 : 0;
  require(schedule.num_spare_warps >= fewest_spare_warps && schedule.num_spare_warps <= 2,
          "schedule.num_spare_warps", schedule.num_spare_warps,
          "must be in " + std::to_string(fewest_spare_warps) + "..2");
  const int most_comm_ctas = gathers ? 0 : num_ctas - 1, most_senders = gathers ? num_ctas : 0;
  require(schedule.num_comm_ctas >= 0 && schedule.num_comm_ctas <= most_comm_ctas,
          "schedule.num_comm_ctas", schedule.num_comm_ctas,
          "must be in 0.." + std::to_string(most_comm_ctas));
  require(schedule.num_senders >= 0 && schedule.num_senders <= most_senders, "schedule.num_senders",
          schedule.num_senders, "must be in 0.." + std::to_string(most_senders));
  require(schedule.push_spread >= 0 && schedule.push_spread <= 100, "schedule.push_spread",
          schedule.push_spread, "must be in 0..100");
  require(schedule.rows_per_launch >= 0 && schedule.rows_per_launch % schedule.tile_m == 0,
          "schedule.rows_per_launch", schedule.rows_per_launch, "must be a multiple of tile_m");
  require(call.op != Op::kAllGather || schedule.rows_per_launch == 0, "schedule.rows_per_launch",
          schedule.rows_per_launch, "AllGather takes all rows in one launch");
}

// Slots and flags of one launch must fit, and the numbers of its items and units into an int.
void check_workspace(const Call& call, const Schedule& schedule, const PeerWindow& window,
                     const RowBlocks& blocks) {
  // Of the whole output (AllReduce), or of one rank's rows.
  const int64_t tiles = blocks.num_batches *
                        ((blocks.rows + schedule.tile_m - 1) / schedule.tile_m) *
                        ((call.n + schedule.tile_n - 1) / schedule.tile_n);
  require(tiles < kMaxSize / kMaxSources, "m", call.m,
          "a launch takes fewer than 2^27 tiles of a rank");
  if (call.op == Op::kAllGather) {
    const int64_t pieces = int64_t{num_tile_rows(blocks, static_cast<int>(schedule.tile_m))} *
                           num_column_parts(static_cast<int>(call.k));
    require(pieces <= window.max_slots, "m", call.m,
            "the workspace has flags for " + std::to_string(window.max_slots) +
                " pieces of 128 rows and 2048 columns a rank");
    return;
  }
  const int64_t tile_bytes = schedule.tile_m * schedule.tile_n * 2;
  const int64_t slots =
      item_layout(call.op, blocks, static_cast<int>(call.n), schedule, window.num_ranks)
          .slots_per_source;
  require(slots <= window.max_slots && slots * schedule.split_k * window.num_ranks * tile_bytes <=
                                           static_cast<int64_t>(window.parity_bytes),
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
  for (const Instances* instances : kAllInstances) {
    for (const Instance& instance : *instances) instance.load();
  }
}

void launch_call(const Call& call, const Schedule& schedule, PeerWindow window, int num_ctas,
                 cudaStream_t stream) {
  const Instance& instance = find_instance(call);
  check_sizes(call, window);
  window.call = {call.op, call.dtype, static_cast<int>(call.m), static_cast<int>(call.n),
                 static_cast<int>(call.k)};
  check_schedule(call, schedule, window.num_ranks, num_ctas);
  const int64_t num_blocks = blocks_of_a_batch(call.op, window.num_ranks);
  const int64_t block_rows = call.m / (call.num_batches * num_blocks);
  const int64_t batch_rows = (block_rows + schedule.tile_m - 1) / schedule.tile_m * schedule.tile_m;
  const int64_t rows_per_launch =
      schedule.rows_per_launch == 0 ? call.num_batches * batch_rows : schedule.rows_per_launch;
  const int64_t batch_step = std::clamp<int64_t>(rows_per_launch / batch_rows, 1, call.num_batches);
  const int64_t row_step = std::min(rows_per_launch, block_rows);
  check_workspace(
      call, schedule, window,
      {static_cast<int>(batch_step), static_cast<int>(block_rows), static_cast<int>(row_step)});

  constexpr int64_t kElementBytes = 2;
  for (int64_t batch = 0; batch < call.num_batches; batch += batch_step) {
    for (int64_t row = 0; row < block_rows; row += row_step) {
      const int64_t x_row = batch * num_blocks * block_rows + row;
      const int64_t output_row = batch * block_rows + row;
      Call part = call;
      part.x = static_cast<const char*>(call.x) + x_row * call.k * kElementBytes;
      part.output = static_cast<char*>(call.output) + output_row * call.n * kElementBytes;
      part.m = call.m - x_row;  // what lies behind x
      const RowBlocks blocks{static_cast<int>(std::min(batch_step, call.num_batches - batch)),
                             static_cast<int>(block_rows),
                             static_cast<int>(std::min(row_step, block_rows - row))};
      instance.launch(part, blocks, schedule, window, num_ctas, stream);
    }
  }
}

}  // namespace entwine
