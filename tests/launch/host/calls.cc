// Reads calls from standard input, a line each, and says what launch_call makes of them: why it refuses
// one, or how many launches it is, the rows of a rank's result that they take, and whether each begins
// where the one before ends and fits into the slots. The launches themselves are stand-ins.
//
// A line: op num_ranks num_ctas slot_bytes max_slots m n k num_batches, then the fields of Schedule.
#include <cstdint>
#include <iostream>

#include "launch/instance.h"
#include "launch/item_layout.h"
#include "launch/launch.h"

namespace entwine {
namespace {

constexpr uintptr_t kX = uintptr_t{1} << 40, kOutput = uintptr_t{1} << 50;

Call whole;
int64_t num_launches, num_rows;
bool right;

void load() {}

bool fits(const RowBlocks& blocks, const Schedule& schedule, const PeerWindow& window) {
  if (whole.op == Op::kAllGather) return true;
  const int64_t slots =
      item_layout(whole.op, blocks, static_cast<int>(whole.n), schedule, window.num_ranks)
          .slots_per_source;
  const int64_t bytes = slots * schedule.split_k * window.num_ranks * schedule.tile_n * 128 * 2;
  return slots <= window.max_slots && bytes <= static_cast<int64_t>(window.parity_bytes);
}

void launch(const Call& call, const RowBlocks& blocks, const Schedule& schedule,
            const PeerWindow& window, int, cudaStream_t) {
  const int64_t blocks_of_a_batch = whole.op == Op::kAllReduce ? 1 : window.num_ranks;
  const int64_t first = (reinterpret_cast<uintptr_t>(call.output) - kOutput) / 2 / whole.n;
  const int64_t x_row = (reinterpret_cast<uintptr_t>(call.x) - kX) / 2 / whole.k;
  const int64_t batch = first / blocks.block_rows, row = first % blocks.block_rows;
  right = right && fits(blocks, schedule, window) && first == num_rows && blocks.num_batches > 0 &&
          blocks.rows > 0 && (blocks.num_batches == 1 || blocks.rows == blocks.block_rows) &&
          x_row == batch * blocks_of_a_batch * blocks.block_rows + row;
  num_launches++;
  num_rows += int64_t{blocks.num_batches} * blocks.rows;
}

constexpr Instances instances_of(Dtype dtype) {
  Instances instances{};
  for (const Op op : {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather}) {
    instances[static_cast<int>(op)] = {op, dtype, false, false, load, launch};
  }
  return instances;
}

}  // namespace

const Instances kBfloat16 = instances_of(Dtype::kBfloat16), kFloat16 = kBfloat16;
const Instances kBfloat16Transposed = kBfloat16, kFloat16Transposed = kBfloat16,
                kTraced = kBfloat16;

}  // namespace entwine

int main() {
  using namespace entwine;
  int op, num_ranks, num_ctas;
  int64_t slot_bytes, m, n, k, num_batches;
  PeerWindow window{};
  Schedule s{};
  while (std::cin >> op >> num_ranks >> num_ctas >> slot_bytes >> window.max_slots >> m >> n >> k >>
         num_batches >> s.tile_m >> s.tile_n >> s.num_comm_ctas >> s.num_senders >>
         s.num_spare_warps >> s.raster >> s.push_spread >> s.narrow_tail >> s.split_k >>
         s.rows_per_launch) {
    window.num_ranks = num_ranks;
    window.parity_bytes = slot_bytes / 2;
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    whole = {static_cast<Op>(op),
             Dtype::kBfloat16,
             at(kX),
             at(kX),
             at(kOutput),
             at(kOutput),
             m,
             n,
             k,
             num_batches,
             false};
    num_launches = num_rows = 0;
    right = true;
    try {
      launch_call(whole, s, window, num_ctas, nullptr);
      std::cout << "launched " << num_launches << ' ' << num_rows << ' ' << right << std::endl;
    } catch (const InvalidCall& refusal) {
      std::cout << "refused " << refusal.what() << std::endl;
    }
  }
}
