// The three roles of a CTA that computes: the loader warp, the push warp, the math warps.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/shared_storage.cuh"
#include "ptx/bulk_copy.cuh"

namespace entwine {

// Tiles are dealt by one counter, the first of a CTA included: whatever number of CTAs is resident,
// they take all the tiles there are.
template <class Config>
__device__ __forceinline__ int claim_tile(const FusedParams<Config>& params) {
  return atomicAdd(&params.window.control[params.window.rank]->next_tile, 1u);
}

// Loader warp: claims tiles, one ahead so that the counter's latency stays hidden, publishes them
// to the other warps and loads their operands by TMA.
template <class Config>
__device__ __forceinline__ void load_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared,
                                          typename Config::Pipeline& pipeline) {
  const int lane = threadIdx.x % 32;
  const int num_tiles = params.num_tiles_m * params.num_tiles_n;
  typename Config::Mainloop mainloop;
  const auto inputs =
      mainloop.load_init(cute::make_shape(params.m, params.n, params.k, 1), params.mainloop);
  auto state = cutlass::make_producer_start_state<typename Config::Pipeline>();
  int tile_idx = shared.first_tile;
  int num_ends = 0;
  for (int item = 0;; item++) {
    TileWork work{-1, 0, 0};
    if (tile_idx < num_tiles) {
      const auto at =
          tile_coordinates(tile_idx, params.num_tiles_m, params.num_tiles_n, params.raster);
      work = {tile_idx, at.tile_m_idx, at.tile_n_idx};
    }
    const int stage = item % kWorkRing;
    wait_phase(params.window, &shared.work_empty[stage], (item / kWorkRing & 1) ^ 1);
    if (lane == 0) {
      shared.work[stage] = work;
      ptx::mbarrier_arrive(&shared.work_full[stage]);
    }
    __syncwarp();
    if (work.tile_idx < 0) {
      if (++num_ends == Config::kNumTeams) break;  // one end for each team
      continue;
    }
    int next_tile = 0;
    if (lane == 0) next_tile = claim_tile(params);
    mainloop.load(params.mainloop, pipeline, state, inputs,
                  cute::make_coord(work.tile_m_idx, work.tile_n_idx, cute::_, 0),
                  cute::make_coord_iterator(cute::shape<3>(cute::get<0>(inputs))),
                  params.num_k_tiles, lane, /*block_rank_in_cluster=*/0, shared.mainloop);
    __syncwarp();
    state.advance(params.num_k_tiles);
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
  const int64_t until = ptx::sm_cycles() + spread * (slot % kNumTurns) / kNumTurns;
  while (ptx::sm_cycles() < until) __nanosleep(100);
}

// Push warp: sends finished tiles from the store buffer to their slot on the owner, then says so.
template <class Config>
__device__ __forceinline__ void push_role(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared) {
  constexpr uint32_t kPacedBytes = 4096;
  const PeerWindow& window = params.window;
  const int lane = threadIdx.x % 32;
  uint32_t parities = 0;  // of buffer_full, a bit per team
  for (int item = 0;; item++) {
    const TileWork work = take_work(window, shared, item);
    if (work.tile_idx < 0) break;
    const int team = item % Config::kNumTeams;
    wait_phase(window, &shared.buffer_full[team], parities >> team & 1);
    parities ^= 1u << team;
    if (lane == 0) {
      const int slot = tile_slot(work.tile_idx, window.num_ranks);
      const int owner = tile_owner(work.tile_idx, window.num_ranks);
      // The next tile is published long before this one is finished, since its loads run ahead.
      const int next = item + 1;
      wait_phase(window, &shared.work_full[next % kWorkRing], next / kWorkRing & 1);
      const bool last = shared.work[next % kWorkRing].tile_idx < 0;
      if (!last) wait_turn(params, slot);

      const int slots_per_source =
          ceil_div(params.num_tiles_m * params.num_tiles_n, window.num_ranks);
      unsigned char* destination =
          window.slots[owner] + (shared.epoch & 1) * window.parity_bytes +
          (static_cast<size_t>(window.rank) * slots_per_source + slot) * Config::kTileBytes;
      const unsigned char* source = shared.store_buffer[team];
      const int rows = min(Config::kTileM, params.m - work.tile_m_idx * Config::kTileM);
      const int columns = min(Config::kTileN, params.n - work.tile_n_idx * Config::kTileN);
      const uint32_t panel_bytes = rows * Config::kPanelRowBytes;
      for (int panel = 0; panel * Config::kPanelColumns < columns; panel++) {
        const uint32_t step = last ? panel_bytes : kPacedBytes;
        for (uint32_t done = 0; done < panel_bytes; done += step) {
          const uint32_t offset = panel * Config::kPanelBytes + done;
          ptx::bulk_store(destination + offset, source + offset, min(step, panel_bytes - done));
          ptx::bulk_commit();
          if (!last) ptx::bulk_wait_source_read();
        }
      }
      ptx::bulk_wait_source_read();
      ptx::mbarrier_arrive(&shared.buffer_empty[team]);
      // Only now is the tile in the owner's memory: `.read` above said nothing of the destination.
      // The proxy fence orders the copies (async proxy) before the release (generic proxy), the
      // release orders them before the epoch for whoever acquires it at system scope.
      ptx::bulk_wait_complete();
      ptx::fence_proxy_async_global();
      ptx::store_release_system(window.control[owner]->tile_ready(slot, window.rank), shared.epoch);
    }
    __syncwarp();
  }
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
    if (work.tile_idx < 0) break;
    typename Config::Mainloop::PipelineState state;
    state.advance(item * params.num_k_tiles);
    auto accumulators =
        cute::partition_fragment_C(mma, cute::take<0, 2>(typename Config::TileShape{}));
    wait_mainloop_turn(params.window, shared, team, item / Config::kNumTeams);
    mainloop.mma(pipeline, state, accumulators, params.num_k_tiles, thread_in_team, shared.mainloop,
                 params.mainloop);
    pass_mainloop_turn(shared, team);
    mainloop.mma_tail(pipeline, state, params.num_k_tiles);
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
