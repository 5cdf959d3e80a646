// The communication role of AllReduce and ReduceScatter: sum the partials of the items that this rank
// owns, in rank order and in float32, and store the sum to every rank's output (AllReduce) or to the
// own one. It is played by spare warps of the CTAs that compute, by whole communication CTAs, and by
// every warp that has run out of items.
#pragma once

#include "kernels/shared_storage.cuh"

namespace entwine {

__device__ __forceinline__ void add_pair(float& low, float& high, uint32_t packed,
                                         cutlass::bfloat16_t) {
  low += __uint_as_float(packed << 16);
  high += __uint_as_float(packed & 0xffff0000u);
}

__device__ __forceinline__ void add_pair(float& low, float& high, uint32_t packed,
                                         cutlass::half_t) {
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&packed));
  low += pair.x;
  high += pair.y;
}

template <class Element>
__device__ __forceinline__ uint4 round_chunk(const float (&sum)[8]) {
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Element low(sum[2 * i]), high(sum[2 * i + 1]);
    packed[i] = low.raw() | static_cast<uint32_t>(high.raw()) << 16;
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// One warp sums one unit. Lanes lie along the rows of the tile, so a store covers whole rows of the
// tile (512 bytes at 256 columns). `peer_output` of lane p is the output of rank p.
template <class Config, class Tile, int kUnroll>
__device__ __forceinline__ void reduce_unit(const FusedParams<Config>& params, uint64_t epoch,
                                            int unit_in_tile, const TilePlace& place,
                                            const void* peer_output) {
  using Element = typename Config::Element;
  constexpr int kRowsPerStep = 32 / Tile::kChunksPerRow;
  constexpr int kNumSteps = Tile::kUnitRows / kRowsPerStep;
  constexpr int kSourcesAtOnce = 4;  // loads in flight: kUnroll of each of so many sources
  static_assert(kNumSteps % kUnroll == 0);

  const PeerWindow& window = params.window;
  const int lane = threadIdx.x % 32;
  const int chunk = lane % Tile::kChunksPerRow;
  const int first_row = unit_in_tile * Tile::kUnitRows + lane / Tile::kChunksPerRow;
  const bool column_valid = place.first_column + chunk * kChunkElements < params.n;
  const size_t source_stride = static_cast<size_t>(params.slots_per_source) * params.slot_bytes;
  const unsigned char* partials = window.slots[window.rank] + (epoch & 1) * window.parity_bytes +
                                  static_cast<size_t>(place.slot) * params.slot_bytes;
  const uint32_t row_chunks = params.n / kChunkElements;
  const size_t first_chunk = static_cast<size_t>(row_chunks) * (place.output_row + first_row) +
                             place.first_column / kChunkElements + chunk;

#pragma unroll 1
  for (int step = 0; step < kNumSteps; step += kUnroll) {
    float sum[kUnroll][8] = {};
    bool valid[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      valid[u] = column_valid && first_row + (step + u) * kRowsPerStep < place.rows;
    }
#pragma unroll 1
    for (int first_source = 0; first_source < window.num_ranks; first_source += kSourcesAtOnce) {
      uint4 partial[kUnroll][kSourcesAtOnce];
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        const int row = first_row + (step + u) * kRowsPerStep;
        const unsigned char* from = partials + chunk_offset(row, chunk);
#pragma unroll
        for (int s = 0; s < kSourcesAtOnce; s++) {
          if (valid[u] && first_source + s < window.num_ranks) {
            // From L2: slots are written by the copy engine and by peers, never through this L1.
            partial[u][s] =
                __ldcg(reinterpret_cast<const uint4*>(from + (first_source + s) * source_stride));
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
#pragma unroll
        for (int s = 0; s < kSourcesAtOnce; s++) {
          if (valid[u] && first_source + s < window.num_ranks) {
            add_pair(sum[u][0], sum[u][1], partial[u][s].x, Element{});
            add_pair(sum[u][2], sum[u][3], partial[u][s].y, Element{});
            add_pair(sum[u][4], sum[u][5], partial[u][s].z, Element{});
            add_pair(sum[u][6], sum[u][7], partial[u][s].w, Element{});
          }
        }
      }
    }
    uint4 rounded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) rounded[u] = round_chunk<Element>(sum[u]);
    // The peers in turn, each rank starting behind itself and ending with itself: no two ranks store
    // to the same one first. ReduceScatter stores to itself only.
#pragma unroll 1
    for (int i = params.op == Op::kAllReduce ? 1 : window.num_ranks; i <= window.num_ranks; i++) {
      int peer = window.rank + i;
      if (peer >= window.num_ranks) peer -= window.num_ranks;
      const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(peer_output), peer);
      uint4* output = reinterpret_cast<uint4*>(address) + first_chunk;
#pragma unroll
      for (int u = 0; u < kUnroll; u++) {
        if (valid[u])
          output[static_cast<size_t>(row_chunks) * ((step + u) * kRowsPerStep)] = rounded[u];
      }
    }
  }
}

// A unit of this rank's slots: units are dealt in the order of the slots.
struct ReduceUnit {
  int slot;
  int in_tile;
};

__device__ __forceinline__ ReduceUnit reduce_unit_at(int unit, const OwnSlots& slots,
                                                     int units_of_whole, int units_of_half) {
  const int in_halves = unit - slots.num_whole * units_of_whole;
  if (in_halves < 0) return {unit / units_of_whole, unit % units_of_whole};
  return {slots.num_whole + in_halves / units_of_half, in_halves % units_of_half};
}

// Takes units until none is left. Units are dealt in the order of the slots, which is that of the
// items (of the other ranks, in ReduceScatter), so a waiting warp waits for the item that comes next.
// It waits only for items that a resident CTA has claimed or will claim without waiting for anyone:
// those CTAs never wait for units.
template <class Config, int kUnroll>
__device__ __forceinline__ void reduce_role(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  using Wide = typename Config::Wide;
  using Narrow = typename Config::Narrow;
  const PeerWindow& window = params.window;
  ControlBlock* control = window.control[window.rank];
  const int lane = threadIdx.x % 32;
  const uint64_t epoch = shared.epoch;
  const int units_of_whole =
      params.tile_n == Wide::kTileN ? Wide::kUnitsPerTile : Narrow::kUnitsPerTile;
  const void* peer_output = params.output;
  uint32_t num_stored = 0;
  for (;;) {
    int unit_idx = 0;
    if (lane == 0) unit_idx = atomicAdd(&control->next_unit, 1u);
    unit_idx = __shfl_sync(~0u, unit_idx, 0);
    const ReduceUnit unit =
        reduce_unit_at(unit_idx, params.slots, units_of_whole, Narrow::kUnitsPerTile);
    if (unit.slot >= params.slots.num_slots) break;
    // Lane p acquires from rank p; __syncwarp() passes that on to the other lanes' loads and
    // stores. A peer's output address stays valid while this warp holds a unit: the peer's kernel
    // of this epoch ends only when the unit has arrived.
    {
      const Span<Config> span(params, TraceKind::kWait, unit.slot, lane == 0);
      if (lane < window.num_ranks) {
        if (num_stored == 0 && params.op == Op::kAllReduce) {
          peer_output = wait_peer_output(window, lane, epoch);
        }
        wait_epoch(window, control->tile_ready(unit.slot, lane), epoch, kWaitTileReady, lane,
                   unit.slot);
      }
      __syncwarp();
    }
    const Span<Config> span(params, TraceKind::kReduce, unit.slot, lane == 0);
    const TilePlace place = place_of_slot(params, unit.slot);
    if (place.narrow) {
      reduce_unit<Config, Narrow, kUnroll>(params, epoch, unit.in_tile, place, peer_output);
    } else {
      reduce_unit<Config, Wide, kUnroll>(params, epoch, unit.in_tile, place, peer_output);
    }
    num_stored++;
  }
  if (lane == 0 && num_stored != 0) atomicAdd(&shared.num_units_stored, num_stored);
}

}  // namespace entwine
