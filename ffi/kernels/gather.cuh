// The communication role of AllGather: send this rank's rows to every rank's gathered x, a flag for each
// tile row. Played by spare warps and communication CTAs from the first moment of the launch.
#pragma once

#include "kernels/shared_storage.cuh"

namespace entwine {

// What a warp sends at a time. Between the counter, the loads and the fence of a unit pass some
// microseconds, so 132 warps with 16 KB each keep the links busy several times over.
constexpr int kGatherUnitBytes = 16384;

// One warp copies `num_bytes` (a multiple of 16) to the same offset of every rank's gathered x.
// `peer_output` of lane p is that of rank p.
template <int kUnroll>
__device__ __forceinline__ void send_unit(const PeerWindow& window, const unsigned char* source,
                                          size_t offset, int num_bytes, const void* peer_output) {
  constexpr int kStepBytes = 32 * sizeof(uint4);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int done = 0; done < num_bytes; done += kUnroll * kStepBytes) {
    uint4 value[kUnroll];
    const int first = done + lane * static_cast<int>(sizeof(uint4));
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const int at = first + u * kStepBytes;
      if (at < num_bytes) value[u] = __ldg(reinterpret_cast<const uint4*>(source + at));
    }
    // The own copy last: nothing waits for it.
#pragma unroll 1
    for (int i = 1; i <= window.num_ranks; i++) {
      int peer = window.rank + i;
      if (peer >= window.num_ranks) peer -= window.num_ranks;
      const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(peer_output), peer);
      unsigned char* destination = reinterpret_cast<unsigned char*>(address) + offset;
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        const int at = first + u * kStepBytes;
        if (at < num_bytes) *reinterpret_cast<uint4*>(destination + at) = value[u];
      }
    }
  }
}

// Takes units until none is left, tile row by tile row, the order in which all ranks need them. Waits
// for nothing but the start of the peers' kernels.
template <class Config>
__device__ __forceinline__ void gather_role(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  const PeerWindow& window = params.window;
  ControlBlock* control = window.control[window.rank];
  const int lane = threadIdx.x % 32;
  const size_t row_bytes = static_cast<size_t>(params.k) * sizeof(typename Config::Element);
  const int units_per_tile_row =
      static_cast<int>((Config::kTileM * row_bytes + kGatherUnitBytes - 1) / kGatherUnitBytes);
  const int num_units = num_tile_rows(params.blocks, Config::kTileM) * units_per_tile_row;
  const void* peer_output = nullptr;
  for (;;) {
    int unit = 0;
    if (lane == 0) unit = atomicAdd(&control->next_unit, 1u);
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= num_units) break;
    if (peer_output == nullptr && lane < window.num_ranks) {
      peer_output = wait_peer_output(window, lane, shared.epoch);
    }
    __syncwarp();
    const int tile_row = unit / units_per_tile_row;
    const auto [batch, row, valid_rows] = row_in_block(tile_row, params.blocks, Config::kTileM);
    const size_t in_shard = static_cast<size_t>(batch) * params.blocks.block_rows + row;
    const size_t in_gathered =
        (static_cast<size_t>(batch) * window.num_ranks + window.rank) * params.blocks.block_rows +
        row;
    const size_t begin = static_cast<size_t>(unit % units_per_tile_row) * kGatherUnitBytes;
    const size_t end = min(begin + kGatherUnitBytes, valid_rows * row_bytes);
    if (begin < end) {
      send_unit<4>(window,
                   static_cast<const unsigned char*>(params.x) + in_shard * row_bytes + begin,
                   in_gathered * row_bytes + begin, static_cast<int>(end - begin), peer_output);
    }
    __syncwarp();
    // The warp that sends the last unit of a tile row tells the peers. The fence of every warp comes
    // before its count (cumulative over __syncwarp), the fence behind the count passes all of them on
    // to the release of the flags.
    bool complete = false;
    if (lane == 0) {
      ptx::fence_system();
      uint32_t* sent = control->units_sent(tile_row, window.max_slots);
      complete = atomicAdd(sent, 1u) + 1 == static_cast<uint32_t>(units_per_tile_row);
      if (complete) {
        *sent = 0;
        ptx::fence_system();
      }
    }
    complete = __shfl_sync(~0u, complete, 0);
    if (complete && lane < window.num_ranks && lane != window.rank) {
      ptx::store_release_system(window.control[lane]->rows_ready(tile_row, window.rank),
                                shared.epoch);
    }
  }
}

}  // namespace entwine
