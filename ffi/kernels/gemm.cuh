// The three roles of a CTA that computes: the loader warp, the push warp, the math warps.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/gather.cuh"
#include "kernels/shared_storage.cuh"
#include "ptx/bulk_copy.cuh"

namespace entwine {

// Tiles are dealt by one counter, the first of a CTA included: whatever number of CTAs is resident,
// they take all the tiles there are.
template <class Config>
__device__ __forceinline__ int claim_tile(const FusedParams<Config>& params) {
  return atomicAdd(&params.window.control[params.window.rank]->next_tile, 1u);
}

// AllGather: waits until a part of the rows of a tile is in the gathered x. The acquire orders the
// source's stores (generic proxy) before this warp's TMA loads (async proxy) only through the fence.
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

// Loader warp: claims tiles, one ahead so that the counter's latency stays hidden, publishes them to
// the other warps and loads their operands by TMA.
template <class Config>
__device__ __forceinline__ void load_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared,
                                          typename Config::Pipeline& pipeline) {
  using namespace cute;
  const int lane = threadIdx.x % 32;
  typename Config::Mainloop mainloop;
  const auto problem = make_shape(params.m, params.n, params.k, 1);
  const auto w_tiles = get<1>(mainloop.load_init(problem, params.mainloop));
  const auto x = params.mainloop.tma_load_a.get_tma_tensor(make_shape(params.m, params.k, 1));
  auto state = cutlass::make_producer_start_state<typename Config::Pipeline>();
  int tile_idx = shared.first_tile;
  int num_ends = 0;
  for (int item = 0;; item++) {
    TileWork work{};
    work.ends = tile_idx >= params.num_tiles;
    if (!work.ends) work.place = place_of(params, tile_idx);
    const int stage = item % kWorkRing;
    wait_phase(params.window, &shared.work_empty[stage], (item / kWorkRing & 1) ^ 1);
    if (lane == 0) {
      shared.work[stage] = work;
      ptx::mbarrier_arrive(&shared.work_full[stage]);
    }
    __syncwarp();
    if (work.ends) {
      if (++num_ends == Config::kNumTeams) break;  // one end for each team
      continue;
    }
    int next_tile = 0;
    if (lane == 0) next_tile = claim_tile(params);
    // Tiles may start at any row: blocks of rows need not be multiples of tiles.
    const bool gathers = params.op == Op::kAllGather;
    const bool own = gathers && work.place.source == params.window.rank;
    const int first_row = own ? work.place.shard_row : work.place.x_row;
    const auto x_tiles =
        local_tile(domain_offset(make_coord(first_row, 0, 0), x), typename Config::TileShape{},
                   make_coord(_, _, _), Step<_1, Underscore, _1>{});
    // Rows of other ranks arrive in parts of k; everything else is there from the start.
    const int k_tiles_of_part =
        gathers && !own ? kGatherColumns / Config::kTileK : params.num_k_tiles;
    for (int first = 0; first < params.num_k_tiles; first += k_tiles_of_part) {
      const int k_tiles = min(k_tiles_of_part, params.num_k_tiles - first);
      if (gathers && !own) wait_rows(params, work.place, first / k_tiles_of_part, shared.epoch);
      const auto k_shape = cute::shape<3>(x_tiles);
      mainloop.load(own ? params.mainloop_own : params.mainloop, pipeline, state,
                    make_tuple(x_tiles, w_tiles), make_coord(0, work.place.tile_n_idx, _, 0),
                    make_coord_iterator(idx2crd(first, k_shape), k_shape), k_tiles, lane,
                    /*block_rank_in_cluster=*/0, shared.mainloop);
      __syncwarp();
      state.advance(k_tiles);
    }
    tile_idx = __shfl_sync(~0u, next_tile, 0);
  }
  mainloop.load_tail(pipeline, state);
  __syncwarp();
}

// All CTAs finish a wave of tiles at the same time. A burst of pushes would fill the queues of the
// links, and the mainloop's own loads would wait behind it; so each push waits for its turn within
// the time that the next tile takes, the same turn on every rank.
template <class Config>
__device__ __forceinline__ void wait_turn(const FusedParams<Config>& params, int slot) {
  constexpr int kNumTurns = 32, kFlopsPerCycle = 4096;  // of one SM, dense 16-bit
  constexpr int kCyclesPerKTile =
      2 * Config::kTileM * Config::kTileN * Config::kTileK / kFlopsPerCycle;
  const int64_t spread =
      static_cast<int64_t>(params.num_k_tiles) * kCyclesPerKTile * params.push_spread / 100;
  const Span<Config> span(params, TraceKind::kPace, slot, true);
  const int64_t until = ptx::sm_cycles() + spread * (slot % kNumTurns) / kNumTurns;
  while (ptx::sm_cycles() < until) __nanosleep(100);
}

// AllReduce, ReduceScatter: sends a tile from the store buffer to its slot on the owner, then says so.
// `last`: no tile follows on this CTA, so nothing is gained by pacing. One thread.
template <class Config>
__device__ __forceinline__ void push_tile(const FusedParams<Config>& params,
                                          const unsigned char* buffer, uint64_t* buffer_empty,
                                          const TilePlace& place, uint64_t epoch, bool last) {
  constexpr uint32_t kPacedBytes = 4096;
  const PeerWindow& window = params.window;
  const Span<Config> span(params, TraceKind::kPush, place.slot, true);
  const int slots_per_source = ceil_div(params.num_tiles, window.num_ranks);
  unsigned char* slot =
      window.slots[place.owner] + (epoch & 1) * window.parity_bytes +
      (static_cast<size_t>(window.rank) * slots_per_source + place.slot) * Config::kTileBytes;
  const int columns = min(Config::kTileN, params.n - place.tile_n_idx * Config::kTileN);
  const uint32_t panel_bytes = place.rows * Config::kPanelRowBytes;
  const uint32_t step = last ? panel_bytes : kPacedBytes;
  for (int panel = 0; panel * Config::kPanelColumns < columns; panel++) {
    for (uint32_t done = 0; done < panel_bytes; done += step) {
      const uint32_t offset = panel * Config::kPanelBytes + done;
      ptx::bulk_store(slot + offset, buffer + offset, min(step, panel_bytes - done));
      ptx::bulk_commit();
      if (!last) ptx::bulk_wait_source_read();
    }
  }
  ptx::bulk_wait_source_read();
  ptx::mbarrier_arrive(buffer_empty);
  // Only now is the tile in the owner's memory: `.read` above said nothing of the destination. The
  // proxy fence orders the copies (async proxy) before the release (generic proxy), the release
  // orders them before the epoch for whoever acquires it at system scope.
  ptx::bulk_wait_complete();
  ptx::fence_proxy_async_global();
  ptx::store_release_system(window.control[place.owner]->tile_ready(place.slot, window.rank),
                            epoch);
}

// AllGather: stores a tile to the output, cut off at the end of its block of rows. One thread.
template <class Config>
__device__ __forceinline__ void store_tile(const FusedParams<Config>& params,
                                           const unsigned char* buffer, uint64_t* buffer_empty,
                                           const TilePlace& place) {
  const int block = place.output_row / params.blocks.block_rows;
  const int row = place.output_row - block * params.blocks.block_rows;
  const int first_column = place.tile_n_idx * Config::kTileN;
  for (int panel = 0; panel < Config::kNumPanels; panel++) {
    ptx::tensor_store_3d(&params.output_map, buffer + panel * Config::kPanelBytes,
                         first_column + panel * Config::kPanelColumns, row, block);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_source_read();
  ptx::mbarrier_arrive(buffer_empty);
}

// Push warp: takes finished tiles out of the store buffers.
template <class Config>
__device__ __forceinline__ void push_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared) {
  const PeerWindow& window = params.window;
  const int lane = threadIdx.x % 32;
  uint32_t parities = 0;  // of buffer_full, a bit per team
  for (int item = 0;; item++) {
    const TileWork work = take_work(window, shared, item);
    if (work.ends) break;
    const int team = item % Config::kNumTeams;
    wait_phase(window, &shared.buffer_full[team], parities >> team & 1);
    parities ^= 1u << team;
    if (lane == 0) {
      if (params.op == Op::kAllGather) {
        store_tile(params, shared.store_buffer[team], &shared.buffer_empty[team], work.place);
      } else {
        // The next tile is published long before this one is finished, since its loads run ahead.
        const int next = item + 1;
        wait_phase(window, &shared.work_full[next % kWorkRing], next / kWorkRing & 1);
        const bool last = shared.work[next % kWorkRing].ends;
        if (!last) wait_turn(params, work.place.slot);
        push_tile(params, shared.store_buffer[team], &shared.buffer_empty[team], work.place,
                  shared.epoch, last);
      }
    }
    __syncwarp();
  }
  if (lane == 0) ptx::bulk_wait_complete();
  __syncwarp();
}

// Rounds a thread's accumulators to the element type and writes them to the store buffer.
template <class Config, class Accumulators>
__device__ __forceinline__ void write_store_buffer(unsigned char* buffer,
                                                   const Accumulators& accumulators,
                                                   int thread_in_team) {
  using Element = typename Config::Element;
  const int lane = thread_in_team % 32;
  // A warp has 16 rows of every 64 (one warpgroup) or 128 (two) that the team's wgmma covers.
  const int first_row = thread_in_team / 32 * 16 + lane % 16;
  constexpr int kPairsPerRow = Config::kTileN / 16;
  const uint32_t base = ptx::shared_address(buffer);
#pragma unroll
  for (int i = 0; i < Config::kNumAccumulators / 8; i++) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const Element low(accumulators(i * 8 + 2 * j)), high(accumulators(i * 8 + 2 * j + 1));
      packed[j] = low.raw() | static_cast<uint32_t>(high.raw()) << 16;
    }
    const int row = first_row + i / kPairsPerRow * 64;
    const int chunk = i % kPairsPerRow * 2 + lane / 16;
    ptx::store_matrix_x4(base + chunk_offset<Config>(row, chunk), packed[0], packed[1], packed[2],
                         packed[3]);
  }
}

// Two teams take the stages of one operand ring in turn, and the parity of a stage's barrier cannot
// tell the next lap from the last but one: a team that looked at a stage before the other had seen
// the lap before arrive would take old data for its own. So a team enters the mainloop of its tile
// only when the other has seen the last stage of the tile before. `count`: tiles that this team has
// begun.
template <class Config>
__device__ __forceinline__ void wait_mainloop_turn(const PeerWindow& window,
                                                   SharedStorage<Config>& shared, int team,
                                                   int count) {
  if constexpr (Config::kNumTeams > 1) {
    // Team 0 begins; its first wait finds the phase before the first complete.
    wait_phase(window, &shared.mainloop_turn[team], (count & 1) ^ (team == 0));
  }
}

template <class Config>
__device__ __forceinline__ void pass_mainloop_turn(SharedStorage<Config>& shared, int team) {
  if constexpr (Config::kNumTeams > 1) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.mainloop_turn[team ^ 1]);
  }
}

// Math warps: multiply, and leave the tile in the store buffer of their team.
template <class Config>
__device__ __forceinline__ void math_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared,
                                          typename Config::Pipeline& pipeline) {
  const int math_thread = threadIdx.x - (Config::kNumThreads - Config::kNumMathThreads);
  const int team = math_thread / Config::kTeamThreads;
  const int thread_in_team = math_thread % Config::kTeamThreads;
  typename Config::Mainloop mainloop;
  typename Config::Mainloop::TiledMma mma;
  uint32_t parity = 1;  // of buffer_empty: the buffer starts empty
  for (int item = team;; item += Config::kNumTeams) {
    const TileWork work = take_work(params.window, shared, item);
    if (work.ends) break;
    typename Config::Mainloop::PipelineState state;
    state.advance(item * params.num_k_tiles);
    auto accumulators =
        cute::partition_fragment_C(mma, cute::take<0, 2>(typename Config::TileShape{}));
    wait_mainloop_turn(params.window, shared, team, item / Config::kNumTeams);
    {
      const Span<Config> span(params, TraceKind::kMainloop, item, thread_in_team == 0);
      mainloop.mma(pipeline, state, accumulators, params.num_k_tiles, thread_in_team,
                   shared.mainloop, params.mainloop);
      pass_mainloop_turn(shared, team);
      mainloop.mma_tail(pipeline, state, params.num_k_tiles);
    }
    const Span<Config> span(params, TraceKind::kEpilogue, item, thread_in_team == 0);
    wait_phase(params.window, &shared.buffer_empty[team], parity);
    parity ^= 1;
    write_store_buffer<Config>(shared.store_buffer[team], accumulators, thread_in_team);
    // Each writer makes its part visible to the async proxy before the push warp may read it.
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.buffer_full[team]);
  }
}

}  // namespace entwine
