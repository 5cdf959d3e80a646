// Threads play the warps of several ranks, which make one call after the other. The words and their
// setting and awaiting are the kernel's own (ffi/peer, compiled unchanged); the roles are those of
// ffi/kernels, with a tile of a few numbers in the place of a matmul. Slots, outputs and buffers are
// plain memory, so that ThreadSanitizer reports whatever is not ordered.
//
// Usage: ranks NUM_RANKS NUM_CALLS SEED [MISSING]. Exit status 0: every result of every call was right,
// or, where rank MISSING does not make the last call, every other rank has recorded which wait failed.
#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <vector>

#include "peer/signal.cuh"

namespace entwine {
namespace {

constexpr int kNumCtas = 2;
constexpr int kUnitsOfTile = 2, kValuesOfUnit = 4;
constexpr int kMaxTiles = 8;

using Unit = std::array<int64_t, kValuesOfUnit>;
using Tile = std::array<Unit, kUnitsOfTile>;

struct Call {
  Op op;
  int num_tiles;  // AllGather: pieces that every rank sends
};

Tile partial(uint64_t epoch, int source, int tile) {
  Tile values;
  for (int unit = 0; unit < kUnitsOfTile; unit++) {
    for (int i = 0; i < kValuesOfUnit; i++) {
      values[unit][i] = epoch * 1'000'000 + source * 10'000 + tile * 100 + unit * 10 + i;
    }
  }
  return values;
}

void add(Unit& sum, const Unit& values) {
  for (int i = 0; i < kValuesOfUnit; i++) sum[i] += values[i];
}

void require(bool holds, const char* what, int rank, uint64_t epoch) {
  if (holds) return;
  std::fprintf(stderr, "wrong %s on rank %d in epoch %d\n", what, rank, static_cast<int>(epoch));
  std::_Exit(2);
}

// The rank that does not make the last call; -1: all do.
int missing = -1;

// What a thread does. A trap ends it, and the program unless a rank is missing.
template <class Body>
void until_trapped(Body body) {
  try {
    body();
  } catch (const host::Trapped&) {
    if (missing >= 0) return;
    std::fprintf(stderr, "a wait has passed its deadline\n");
    std::_Exit(3);
  }
}

// Lets threads meet in many orders.
void linger() {
  thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 64));
}

// A rank's device memory.
struct Rank {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  Rank() {
    const size_t bytes = sizeof(ControlBlock) + ControlBlock::bytes_behind(kMaxTiles);
    const size_t rounded =
        (bytes + alignof(ControlBlock) - 1) / alignof(ControlBlock) * alignof(ControlBlock);
    void* memory = std::aligned_alloc(alignof(ControlBlock), rounded);
    std::fill_n(static_cast<unsigned char*>(memory), rounded, 0);
    control.reset(static_cast<ControlBlock*>(memory));
  }

  std::unique_ptr<ControlBlock, Free> control;
  std::array<Tile, 2 * kMaxRanks * kMaxTiles> slots{};
  std::array<Tile, kMaxTiles> x{};
  std::array<Tile, kMaxRanks * kMaxTiles> output{}, gathered{};
  WaitFailure failure{};
  PeerWindow window{};
};

struct Launch {
  Rank& memory;
  const PeerWindow& window;
  Call call;
  ControlBlock* control;
  int num_items, num_units;  // of this rank; stored to this rank
  int num_sent, own_last;  // of its own items: summed from slots alone; at the end (ReduceScatter)
};

// As in ffi/launch/instance.cuh.
Launch launch_of(Rank& memory, const Call& call) {
  const PeerWindow& window = memory.window;
  const int num_ranks = window.num_ranks;
  const bool scatters = call.op == Op::kReduceScatter;
  const int num_items = call.op == Op::kAllGather ? call.num_tiles * num_ranks : call.num_tiles;
  const int slots = num_owned_tiles(num_items, num_ranks, window.rank);
  int last_wave = (num_items - 1) % kNumCtas + 1;
  if (scatters) last_wave = std::min(last_wave, slots);
  return {.memory = memory,
          .window = window,
          .call = call,
          .control = memory.control.get(),
          .num_items = num_items,
          .num_units = call.num_tiles * kUnitsOfTile,
          .num_sent = scatters ? slots - last_wave
                               : num_owned_tiles(num_items - last_wave, num_ranks, window.rank),
          .own_last = scatters ? last_wave : 0};
}

// What comes at a position of this rank.
struct Item {
  int owner, slot, tile;
  bool ends, sums_itself;
};

Item item_at(const Launch& launch, int item_idx) {
  const int num_ranks = launch.window.num_ranks, rank = launch.window.rank;
  const Divisor by_ranks = make_divisor(num_ranks);
  int owner = tile_owner(item_idx, by_ranks), slot = tile_slot(item_idx, by_ranks);
  if (launch.call.op == Op::kReduceScatter) {
    const OwnersItem turn =
        reducescatter_turn(item_idx, launch.call.num_tiles / num_ranks, by_ranks,
                           make_divisor(num_ranks - 1), rank, launch.own_last);
    owner = turn.owner, slot = turn.item_idx;
  }
  return {owner, slot, owned_tile(slot, num_ranks, owner), item_idx >= launch.num_items,
          owner == rank && slot >= launch.num_sent};
}

// Shared memory of a CTA.
struct Shared {
  uint64_t buffer_full, buffer_empty;
  Tile store_buffer;
  Item item_in_buffer;
  int first_item;
  uint64_t epoch;
  uint32_t num_units_stored;
};

int claim_item(const Launch& launch) { return atomicAdd(&launch.control->next_item, 1); }

Tile& slot_of(const PeerWindow& window, int owner, int slot, int source, uint64_t epoch) {
#ifdef MUTANT_ONE_PARITY
  epoch = 0;
#endif
  auto* slots = reinterpret_cast<Tile*>(window.slots[owner] + (epoch & 1) * window.parity_bytes);
  return slots[source * kMaxTiles + slot];
}

void* wait_output(const PeerWindow& window, int peer, [[maybe_unused]] uint64_t epoch) {
#ifdef MUTANT_NO_HANDSHAKE
  while (ptx::load_relaxed_system(&window.control[window.rank]->ready[peer].output) == 0) {
    std::this_thread::yield();
  }
  return reinterpret_cast<void*>(
      ptx::load_relaxed_system(&window.control[window.rank]->ready[peer].output));
#else
  return wait_peer_output(window, peer, epoch);
#endif
}

// AllGather: the product of an item is the sum of its rows' values and 1.
void multiply_gathered(const Launch& launch, const Shared& shared, int item) {
  const PeerWindow& window = launch.window;
  const int source = (window.rank + item / launch.call.num_tiles) % window.num_ranks;
  const int piece = item % launch.call.num_tiles;
  Tile rows = launch.memory.x[piece];
  if (source != window.rank) {
    wait_epoch(window, launch.control->rows_ready(piece, source), shared.epoch, kWaitRowsReady,
               source, piece);
    rows = launch.memory.gathered[source * kMaxTiles + piece];
  }
  for (Unit& unit : rows) add(unit, {1, 1, 1, 1});
  launch.memory.output[source * kMaxTiles + piece] = rows;
}

// Where the ranks want their outputs, when the partials of an item have come.
std::array<void*, kMaxRanks> wait_partials(const Launch& launch, uint64_t epoch, int slot,
                                           bool own_too) {
  const PeerWindow& window = launch.window;
  std::array<void*, kMaxRanks> outputs{};
  outputs[window.rank] = launch.memory.output.data();
  for (int peer = 0; peer < window.num_ranks; peer++) {
    if (launch.call.op == Op::kAllReduce) outputs[peer] = wait_output(window, peer, epoch);
    if (peer == window.rank && !own_too) continue;
    const uint64_t* flag = launch.control->tile_ready(slot, peer);
#ifdef MUTANT_RELAXED_SUM
    while (!own_too && ptx::load_relaxed_system(flag) < epoch) std::this_thread::yield();
    if (!own_too) continue;
#endif
    wait_epoch(window, flag, epoch, kWaitTileReady, peer, slot);
  }
  linger();
  return outputs;
}

// `own`: this rank's partial in the store buffer, or null if it lies in a slot too.
void sum_unit(const Launch& launch, uint64_t epoch, int slot, int in_tile, const Tile* own,
              const std::array<void*, kMaxRanks>& outputs) {
  const PeerWindow& window = launch.window;
  Unit sum{};
  for (int source = 0; source < window.num_ranks; source++) {
    const bool in_buffer = own != nullptr && source == window.rank;
    add(sum, (in_buffer ? *own : slot_of(window, window.rank, slot, source, epoch))[in_tile]);
  }
  const int tile = owned_tile(slot, window.num_ranks, window.rank);
  for (int i = launch.call.op == Op::kAllReduce ? 1 : window.num_ranks; i <= window.num_ranks;
       i++) {
    const int peer = (window.rank + i) % window.num_ranks;
    static_cast<Tile*>(outputs[peer])[tile][in_tile] = sum;
  }
}

void sum_own_item(const Launch& launch, Shared& shared, const Item& item) {
  const auto outputs = wait_partials(launch, shared.epoch, item.slot, false);
  for (int unit = 0; unit < kUnitsOfTile; unit++) {
    sum_unit(launch, shared.epoch, item.slot, unit, &shared.store_buffer, outputs);
  }
  atomicAdd(&shared.num_units_stored, kUnitsOfTile);
}

void math_role(const Launch& launch, Shared& shared) {
  int item_idx = shared.first_item;
  for (int count = 0;; count++) {
    linger();
    const Item item = item_at(launch, item_idx);
    if (launch.call.op == Op::kAllGather) {
      if (item.ends) break;
      multiply_gathered(launch, shared, item_idx);
    } else {
      wait_phase(launch.window, &shared.buffer_empty, (count & 1) ^ 1);
      shared.item_in_buffer = item;
      if (!item.ends) {
        shared.store_buffer = partial(shared.epoch, launch.window.rank, item.tile);
        if (item.sums_itself) sum_own_item(launch, shared, item);
      }
      ptx::mbarrier_arrive(&shared.buffer_full);
      if (item.ends) break;
    }
    item_idx = claim_item(launch);
  }
}

void push_role(const Launch& launch, Shared& shared) {
  const PeerWindow& window = launch.window;
  for (int count = 0;; count++) {
    wait_phase(window, &shared.buffer_full, count & 1);
    linger();
    const Item item = shared.item_in_buffer;
    if (item.ends) break;
    if (item.sums_itself) {
      ptx::mbarrier_arrive(&shared.buffer_empty);
      continue;
    }
    slot_of(window, item.owner, item.slot, window.rank, shared.epoch) = shared.store_buffer;
    ptx::mbarrier_arrive(&shared.buffer_empty);
    ptx::store_release_system(window.control[item.owner]->tile_ready(item.slot, window.rank),
                              shared.epoch);
  }
}

void reduce_role(const Launch& launch, Shared& shared) {
  uint32_t num_stored = 0;
  for (;;) {
    const int unit = atomicAdd(&launch.control->next_unit, 1);
    const int slot = unit / kUnitsOfTile;
    if (slot >= launch.num_sent) break;
    const auto outputs = wait_partials(launch, shared.epoch, slot, true);
    sum_unit(launch, shared.epoch, slot, unit % kUnitsOfTile, nullptr, outputs);
    num_stored++;
  }
  if (num_stored != 0) atomicAdd(&shared.num_units_stored, num_stored);
}

void gather_role(const Launch& launch, Shared& shared) {
  const PeerWindow& window = launch.window;
  std::array<void*, kMaxRanks> outputs{};
  for (;;) {
    const int unit = atomicAdd(&launch.control->next_unit, 1);
    const int piece = unit / kUnitsOfTile, in_piece = unit % kUnitsOfTile;
    if (piece >= launch.call.num_tiles) break;
    for (int peer = 0; peer < window.num_ranks; peer++) {
      if (outputs[peer] == nullptr) outputs[peer] = wait_output(window, peer, shared.epoch);
    }
    const auto copy_to = [&](int peer) {
      auto* gathered = static_cast<Tile*>(outputs[peer]);
      gathered[window.rank * kMaxTiles + piece][in_piece] = launch.memory.x[piece][in_piece];
    };
    for (int i = 1; i < window.num_ranks; i++) copy_to((window.rank + i) % window.num_ranks);
    linger();
    ptx::fence_system();
    uint32_t* sent = launch.control->units_sent(piece, window.max_slots);
    if (atomicAdd(sent, 1) + 1 == kUnitsOfTile) {
      ptx::fence_system();
      *sent = 0;
      for (int peer = 0; peer < window.num_ranks; peer++) {
        if (peer == window.rank) continue;
        ptx::store_release_system(window.control[peer]->rows_ready(piece, window.rank),
                                  shared.epoch);
      }
    }
    copy_to(window.rank);  // for which nobody waits
  }
}

void communicate(const Launch& launch, Shared& shared) {
  if (launch.call.op == Op::kAllGather) {
    gather_role(launch, shared);
  } else {
    reduce_role(launch, shared);
  }
}

void finish_cta(const Launch& launch, const Shared& shared) {
  const PeerWindow& window = launch.window;
  ControlBlock* control = launch.control;
  const bool counts = launch.call.op == Op::kAllReduce;
  if (counts && shared.num_units_stored != 0) {
    ptx::fence_system();
    for (int peer = 0; peer < window.num_ranks; peer++) {
      ptx::add_relaxed_system(&window.control[peer]->arrived, shared.num_units_stored);
    }
  }
  if (ptx::add_acq_rel_gpu(&control->exited, 1) + 1 < kNumCtas) return;
  if (counts) {
    const uint64_t expected = control->arrived_base + launch.num_units;
    wait_arrived(window, expected);
    control->arrived_base = expected;
  }
  control->next_item = control->next_unit = control->next_cta = control->exited = 0;
  control->epoch = shared.epoch;
}

void run_cta(const Launch& launch) {
  Shared shared{};
  ptx::mbarrier_init(&shared.buffer_full, 1);
  ptx::mbarrier_init(&shared.buffer_empty, 1);
  shared.epoch = ptx::load_relaxed_gpu(&launch.control->epoch) + 1;
  shared.first_item = claim_item(launch);
  {
    std::vector<std::jthread> warps;
    if (launch.call.op != Op::kAllGather) {
      warps.emplace_back([&] { until_trapped([&] { push_role(launch, shared); }); });
    }
    warps.emplace_back([&] {
      linger();
      if (shared.first_item == 0) {
        void* output = launch.call.op == Op::kAllGather ? launch.memory.gathered.data()
                                                        : launch.memory.output.data();
        for (int peer = 0; peer < launch.window.num_ranks; peer++) {
          set_ready(launch.window, peer, output, shared.epoch);
        }
      }
      until_trapped([&] { communicate(launch, shared); });
    });
    math_role(launch, shared);
    if (launch.call.op != Op::kAllGather) communicate(launch, shared);
  }
  finish_cta(launch, shared);
}

// What the program around the call does with the memory, before it and after it.
void prepare(Rank& memory, uint64_t epoch) {
  memory.output.fill({});
  memory.gathered.fill({});
  for (int piece = 0; piece < kMaxTiles; piece++) {
    memory.x[piece] = partial(epoch, memory.window.rank, piece);
  }
}

void check(const Rank& memory, const Call& call, uint64_t epoch) {
  const int rank = memory.window.rank, num_ranks = memory.window.num_ranks;
  for (int tile = 0; tile < call.num_tiles; tile++) {
    Tile sum{};
    for (int source = 0; source < num_ranks; source++) {
      const Tile rows = partial(epoch, source, tile);
      for (int unit = 0; unit < kUnitsOfTile; unit++) add(sum[unit], rows[unit]);
      if (call.op != Op::kAllGather) continue;
      Tile product = rows;
      for (Unit& unit : product) add(unit, {1, 1, 1, 1});
      const int place = source * kMaxTiles + tile;
      require(memory.gathered[place] == rows, "gathered x", rank, epoch);
      require(memory.output[place] == product, "product", rank, epoch);
    }
    if (call.op == Op::kAllGather) continue;
    const bool receives =
        call.op == Op::kAllReduce || tile_owner(tile, make_divisor(num_ranks)) == rank;
    require(memory.output[tile] == (receives ? sum : Tile{}), "sum", rank, epoch);
  }
}

void run_rank(Rank& memory, const std::vector<Call>& calls) {
  uint64_t epoch = 0;
  for (const Call& call : calls) {
    epoch++;
    const bool fails = missing >= 0 && epoch == calls.size();
    if (fails && memory.window.rank == missing) return;
    if (fails) memory.window.deadline_ns = 1'000'000'000;
    prepare(memory, epoch);
    linger();
    const Launch launch = launch_of(memory, call);
    {
      std::vector<std::jthread> ctas;
      for (int i = 0; i < kNumCtas; i++) {
        ctas.emplace_back([&] { until_trapped([&] { run_cta(launch); }); });
      }
    }
    if (!fails) check(memory, call, epoch);
  }
}

std::vector<Call> random_calls(int num_ranks, int num_calls, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Call> calls;
  for (int i = 0; i < num_calls; i++) {
    const auto op = static_cast<Op>(random() % 3);
    // ReduceScatter has a tile for every rank.
    const int num_tiles =
        op == Op::kReduceScatter ? num_ranks * (1 + random() % 2) : 1 + random() % 5;
    calls.push_back({op, num_tiles});
  }
  return calls;
}

void run(int num_ranks, const std::vector<Call>& calls) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < num_ranks; rank++) ranks.push_back(std::make_unique<Rank>());
  for (int rank = 0; rank < num_ranks; rank++) {
    PeerWindow& window = ranks[rank]->window;
    window.rank = rank;
    window.num_ranks = num_ranks;
    for (int peer = 0; peer < num_ranks; peer++) {
      window.control[peer] = ranks[peer]->control.get();
      window.slots[peer] = reinterpret_cast<unsigned char*>(ranks[peer]->slots.data());
    }
    window.parity_bytes = sizeof(Rank::slots) / 2;
    window.max_slots = kMaxTiles;
    window.failure = &ranks[rank]->failure;
    window.deadline_ns = 20'000'000'000;
  }
  {
    std::vector<std::jthread> threads;
    for (auto& rank : ranks) threads.emplace_back([&] { run_rank(*rank, calls); });
  }
  if (missing < 0) return;
  for (auto& rank : ranks) {
    const WaitFailure& failure = rank->failure;
    const bool waited = failure.kind != kWaitNone && failure.rank == rank->window.rank;
    require(waited == (rank->window.rank != missing), "record", rank->window.rank, calls.size());
  }
}

}  // namespace
}  // namespace entwine

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 1;
  if (argc == 5) entwine::missing = std::atoi(argv[4]);
  const int num_ranks = std::atoi(argv[1]), num_calls = std::atoi(argv[2]);
  entwine::run(num_ranks, entwine::random_calls(num_ranks, num_calls, std::atoi(argv[3])));
  std::puts("right");
}
