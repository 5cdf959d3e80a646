// The three roles of a CTA that computes: the loader warp, the push warp, the math warps.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/comm.cuh"
#include "ptx/bulk_copy.cuh"

namespace entwine {

// Items are dealt by one counter, the first of a CTA included: whatever number of CTAs is resident,
// they take all the items there are.
template <class Config>
__device__ __forceinline__ int claim_item(const FusedParams<Config>& params) {
  return atomicAdd(&params.window.control[params.window.rank]->next_item, 1u);
}

// AllGather: waits until a part of the rows of a tile is in the gathered x. The acquire orders the
// source's stores before this warp's TMA loads (async proxy) only through the fence.
template <class Config>
__device__ __forceinline__ void wait_rows(const FusedParams<Config>& params, const TilePlace& place,
                                          int column_part, uint64_t epoch) {
  const PeerWindow& window = params.window;
  const Span<Config> span(params, TraceKind::kWaitRows, place.tile_row, is_lane_0());
  if (threadIdx.x % 32 == 0) {
    const int slot = piece_slot(place.tile_row, column_part, num_column_parts(params.k));
    const uint64_t* flag = window.control[window.rank]->rows_ready(slot, place.source);
    wait_epoch(window, flag, epoch, kWaitRowsReady, place.source, place.tile_row);
  }
  __syncwarp();
  ptx::fence_proxy_async_global();
}

// The ring of operand stages of one tile shape, as the loader warp sees it.
template <class Tile>
struct OperandRing {
  using Mainloop = typename Tile::Mainloop;
  const typename Mainloop::Params& maps;
  typename Tile::Pipeline& pipeline;
  typename Mainloop::TensorStorage& storage;
  typename Mainloop::PipelineState state =
      cutlass::make_producer_start_state<typename Tile::Pipeline>();
};

// Loads the operands of one item by TMA. Of x as many rows as any tile has: the copy engine is slow to
// fill rows that lie outside, and what the rest of a stage holds only ever meets rows that are
// not stored.
template <class Config, class Tile>
__device__ __forceinline__ void load_operands(const FusedParams<Config>& params,
                                              OperandRing<Tile>& ring, const TilePlace& place,
                                              uint64_t epoch) {
  using namespace cute;
  using Mainloop = typename Tile::Mainloop;
  const auto w = ring.maps.tma_load_b.get_tma_tensor(make_shape(params.n, params.k, 1));
  const auto w_tiles =
      local_tile(w, typename Tile::TileShape{}, make_coord(_, place.first_column / Tile::kTileN, _),
                 Step<Underscore, _1, _1>{});
  const auto w_copy = ring.maps.tma_load_b.get_slice(0);
  const auto from_w = w_copy.partition_S(w_tiles(_, _, _, 0));
  const auto to_w = w_copy.partition_D(
      make_tensor(make_smem_ptr(ring.storage.smem_B.data()), typename Mainloop::SmemLayoutB{}));
  // Tiles may start at any row: blocks of rows need not be multiples of tiles.
  constexpr bool kGathers = Config::kOp == Op::kAllGather;
  const bool own = kGathers && place.source == params.window.rank;
  const int first_row = own ? place.shard_row : place.x_row;
  const int first_k_tile = place.k_part * params.num_k_tiles;
  // Rows of other ranks arrive in parts of k; everything else is there from the start.
  const int tiles_of_part = kGathers && !own ? kGatherColumns / kTileK : params.num_k_tiles;
  for (int first = 0; first < params.num_k_tiles; first += tiles_of_part) {
    const int k_tiles = min(tiles_of_part, params.num_k_tiles - first);
    if (kGathers && !own) wait_rows(params, place, first / tiles_of_part, epoch);
    // The compiler has to see that it is one thread, or it loops over the lanes for each copy.
    if (elect_one_sync()) {
      auto state = ring.state;
#pragma unroll 1
      for (int i = 0; i < k_tiles; i++, ++state) {
        const int k_tile = first_k_tile + first + i, stage = state.index();
        ring.pipeline.producer_acquire(state);
        auto* full = ring.pipeline.producer_get_barrier(state);
        ptx::tensor_load_2d(own ? &params.own_x_map : &params.x_map,
                            ring.storage.smem_A.data() + stage * kTileM * kTileK, k_tile * kTileK,
                            first_row, reinterpret_cast<uint64_t*>(full));
        copy(ring.maps.tma_load_b.with(*full, 0), from_w(_, _, _, k_tile), to_w(_, _, _, stage));
      }
    }
    __syncwarp();
    ring.state.advance(k_tiles);
  }
}

// Returns when the math warps have read all stages.
template <class Tile>
__device__ __forceinline__ void drain(const OperandRing<Tile>& ring) {
  typename Tile::Mainloop mainloop;
  mainloop.load_tail(ring.pipeline, ring.state);
  __syncwarp();
}

// Loader warp: claims items, one ahead so that the counter's latency stays hidden, publishes them to
// the other warps and loads their operands.
template <class Config>
__device__ __forceinline__ void load_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared,
                                          OperandRing<typename Config::Wide> wide,
                                          OperandRing<typename Config::Narrow> narrow) {
  const int lane = threadIdx.x % 32;
  int item_idx = shared.first_item;
  bool was_narrow = false;
  for (int item = 0;; item++) {
    TileWork work{};
    work.ends = item_idx >= params.num_items;
    if (!work.ends) work.place = place_of(params, item_idx);
    const int stage = item % kWorkRing;
    wait_phase(params.window, &shared.work_empty[stage], (item / kWorkRing & 1) ^ 1);
    if (lane == 0) {
      shared.work[stage] = work;
      ptx::mbarrier_arrive(&shared.work_full[stage]);
    }
    __syncwarp();
    if (work.ends) break;
    int next_item = 0;
    if (lane == 0) next_item = claim_item(params);
    // The two rings share their memory, and neither's barriers know of the other's readers.
    if (item > 0 && was_narrow != work.place.narrow) {
      if (was_narrow) {
        drain(narrow);
      } else {
        drain(wide);
      }
    }
    was_narrow = work.place.narrow;
    if (was_narrow) {
      load_operands(params, narrow, work.place, shared.epoch);
    } else {
      load_operands(params, wide, work.place, shared.epoch);
    }
    item_idx = __shfl_sync(~0u, next_item, 0);
  }
  drain(wide);
  drain(narrow);
}

// All CTAs finish a wave of items at the same time. A burst of pushes would fill the queues of the
// links, and the mainloop's own loads would wait behind it; so each push waits for its turn within
// the time that the next item takes, the same turn on every rank.
template <class Config>
__device__ __forceinline__ void wait_turn(const FusedParams<Config>& params, const TilePlace& place,
                                          bool next_narrow) {
  constexpr int kFlopsPerCycle = 4096;                                    // of one SM, dense 16-bit
  constexpr int kCyclesPerColumn = 2 * kTileM * kTileK / kFlopsPerCycle;  // of a k tile
  const Span<Config> span(params, TraceKind::kPace, place.slot, true);
  const int columns = next_narrow ? Config::Narrow::kTileN : Config::Wide::kTileN;
  const int64_t spread = static_cast<int64_t>(params.num_k_tiles) * columns * kCyclesPerColumn *
                         params.push_spread / 100;
  const Divisor& num_turns = params.num_turns;
  const int turn = (place.slot * params.split_k.value + place.k_part) % num_turns;
  const int64_t until = ptx::sm_cycles() + spread * turn / num_turns.value;
  while (ptx::sm_cycles() < until) __nanosleep(100);
}

// AllReduce, ReduceScatter: sends an item from the store buffer to its slot on the owner, then says
// so. `last`: no item follows on this CTA, so nothing is gained by pacing. One thread.
template <class Config>
__device__ __forceinline__ void push_item(const FusedParams<Config>& params,
                                          const unsigned char* buffer, uint64_t* buffer_empty,
                                          const TilePlace& place, uint64_t epoch, bool last) {
  constexpr uint32_t kPacedBytes = 4096;
  const PeerWindow& window = params.window;
  const Span<Config> span(params, TraceKind::kPush, place.slot, true);
  const int source = source_of(params, window.rank, place.k_part);
  unsigned char* slot =
      window.slots[place.owner] + (epoch & 1) * window.parity_bytes +
      (static_cast<size_t>(source) * params.slots_per_source + place.slot) * params.slot_bytes;
  const int columns = min(place.narrow ? Config::Narrow::kTileN : Config::Wide::kTileN,
                          params.n - place.first_column);
  const uint32_t panel_bytes = place.rows * kPanelRowBytes;
  const uint32_t step = last ? panel_bytes : kPacedBytes;
  for (int panel = 0; panel * kPanelColumns < columns; panel++) {
    for (uint32_t done = 0; done < panel_bytes; done += step) {
      const uint32_t offset = panel * kPanelBytes + done;
      ptx::bulk_store(slot + offset, buffer + offset, min(step, panel_bytes - done));
      ptx::bulk_commit();
      if (!last) ptx::bulk_wait_source_read();
    }
  }
  ptx::bulk_wait_source_read();
  ptx::mbarrier_arrive(buffer_empty);
  // Only now is the item in the owner's memory: `.read` above said nothing of the destination. A copy
  // (async proxy) that is complete comes before what this thread does next (generic proxy), so the
  // release orders it before the epoch for whoever acquires that at system scope. The fence guards
  // the slots a second time, beside the boundaries of kernels (finish_cta).
  ptx::bulk_wait_complete();
  ptx::fence_proxy_async_global();
  ptx::store_release_system(window.control[place.owner]->tile_ready(place.slot, source), epoch);
}

// AllGather: stores an item to the output, cut off at the end of its block of rows. One thread.
template <class Config>
__device__ __forceinline__ void store_item(const FusedParams<Config>& params,
                                           const unsigned char* buffer, uint64_t* buffer_empty,
                                           const TilePlace& place) {
  const int block = place.output_row / params.block_rows;
  const int row = place.output_row - block * params.block_rows.value;
  const int num_panels = place.narrow ? Config::Narrow::kNumPanels : Config::Wide::kNumPanels;
  for (int panel = 0; panel < num_panels; panel++) {
    ptx::tensor_store_3d(&params.output_map, buffer + panel * kPanelBytes,
                         place.first_column + panel * kPanelColumns, row, block);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_source_read();
  ptx::mbarrier_arrive(buffer_empty);
}

// Push warp: takes finished items out of the store buffer.
template <class Config>
__device__ __forceinline__ void push_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared) {
  const PeerWindow& window = params.window;
  const int lane = threadIdx.x % 32;
  for (int item = 0;; item++) {
    const TileWork work = take_work(window, shared, item);
    if (work.ends) break;
    wait_phase(window, &shared.buffer_full, item & 1);
    if (lane == 0) {
      if constexpr (Config::kOp == Op::kAllGather) {
        store_item(params, shared.store_buffer, &shared.buffer_empty, work.place);
      } else if (sums_itself(params, work.place)) {
        ptx::mbarrier_arrive(&shared.buffer_empty);  // the math warps are done with it
      } else {
        // The next item is published long before this one is finished, since its loads run ahead.
        const TileWork& next = shared.work[(item + 1) % kWorkRing];
        wait_phase(window, &shared.work_full[(item + 1) % kWorkRing], (item + 1) / kWorkRing & 1);
        const bool last = next.ends;
        if (!last && work.place.owner != window.rank) {
          wait_turn(params, work.place, next.place.narrow);
        }
        push_item(params, shared.store_buffer, &shared.buffer_empty, work.place, shared.epoch,
                  last);
      }
    }
    __syncwarp();
  }
  if (lane == 0) ptx::bulk_wait_complete();
  __syncwarp();
}

// Rounds a thread's accumulators to the element type and writes them to the store buffer.
template <class Element, class Tile, class Accumulators>
__device__ __forceinline__ void write_store_buffer(unsigned char* buffer,
                                                   const Accumulators& accumulators,
                                                   int math_thread) {
  const int lane = math_thread % 32;
  // A warp has 16 rows of the tile.
  const int row = math_thread / 32 * 16 + lane % 16;
  const uint32_t base = ptx::shared_address(buffer);
#pragma unroll
  for (int i = 0; i < Tile::kNumAccumulators / 8; i++) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const Element low(accumulators(i * 8 + 2 * j)), high(accumulators(i * 8 + 2 * j + 1));
      packed[j] = low.raw() | static_cast<uint32_t>(high.raw()) << 16;
    }
    const int chunk = i * 2 + lane / 16;
    ptx::store_matrix_x4(base + chunk_offset(row, chunk), packed[0], packed[1], packed[2],
                         packed[3]);
  }
}

// Multiplies one item and leaves it in the store buffer. `count`: items of this tile
// shape that the CTA has multiplied before; `item`: of any shape.
template <class Config, class Tile>
__device__ __forceinline__ void multiply(const FusedParams<Config>& params,
                                         SharedStorage<Config>& shared,
                                         typename Tile::Pipeline& pipeline,
                                         typename Tile::Mainloop::TensorStorage& storage,
                                         const typename Tile::Mainloop::Params& maps, int count,
                                         int item) {
  const int math_thread = threadIdx.x - (kNumThreads - kNumMathThreads);
  typename Tile::Mainloop mainloop;
  typename Tile::Mainloop::TiledMma mma;
  auto accumulators = cute::partition_fragment_C(mma, cute::take<0, 2>(typename Tile::TileShape{}));
  {
    const Span<Config> span(params, TraceKind::kMainloop, item, math_thread == 0);
    typename Tile::Mainloop::PipelineState state;
    state.advance(count * params.num_k_tiles);
    mainloop.mma(pipeline, state, accumulators, params.num_k_tiles, math_thread, storage, maps);
    mainloop.mma_tail(pipeline, state, params.num_k_tiles);
  }
  const Span<Config> span(params, TraceKind::kEpilogue, item, math_thread == 0);
  wait_phase(params.window, &shared.buffer_empty, (item & 1) ^ 1);  // it starts empty
  write_store_buffer<typename Config::Element, Tile>(shared.store_buffer, accumulators,
                                                     math_thread);
  __syncwarp();
}

// Math warps.
template <class Config>
__device__ __forceinline__ void math_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared,
                                          typename Config::Wide::Pipeline& wide,
                                          typename Config::Narrow::Pipeline& narrow) {
  int num_narrow = 0;
  for (int item = 0;; item++) {
    // Read again after the mainloop, which needs the registers.
    const TileWork& work = wait_work(params.window, shared, item);
    if (work.ends) break;
    if (work.place.narrow) {
      multiply<Config, typename Config::Narrow>(params, shared, narrow, shared.narrow,
                                                params.narrow, num_narrow, item);
      num_narrow++;
    } else {
      multiply<Config, typename Config::Wide>(params, shared, wide, shared.wide, params.wide,
                                              item - num_narrow, item);
    }
    const TileWork& done = shared.work[item % kWorkRing];
    if (sums_itself(params, done.place)) {
      sum_own_item(params, shared, done.place);
    } else {
      // Each writer makes its part visible to the async proxy before the push warp may read it.
      ptx::fence_proxy_async_shared();
    }
    release_work(shared, item);
    __syncwarp();
    if (is_lane_0()) ptx::mbarrier_arrive(&shared.buffer_full);
  }
}

}  // namespace entwine
