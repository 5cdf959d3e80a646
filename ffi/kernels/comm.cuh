// The communication role of AllReduce and ReduceScatter: sum the partials of the items that this rank
// owns, in float32 and in a fixed order (by rank, part of k by part), and store the sum to every rank's
// output (AllReduce) or to the own one. It is played by spare warps of the CTAs that compute, by whole
// communication CTAs, and by every warp that has run out of items. The items of the last wave are
// summed by the math warps that made them, straight from the store buffer.
#pragma once

#include "kernels/shared_storage.cuh"

namespace entwine {

// Two elements of 16 bits each, as one register holds them.
template <class Element>
struct Pair;

template <>
struct Pair<cutlass::bfloat16_t> {
  using Packed = __nv_bfloat162;
  static __device__ float2 unpack(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
  static __device__ Packed round(float2 pair) { return __float22bfloat162_rn(pair); }
};

template <>
struct Pair<cutlass::half_t> {
  using Packed = __half2;
  static __device__ float2 unpack(uint32_t packed) {
    return __half22float2(reinterpret_cast<const Packed&>(packed));
  }
  static __device__ Packed round(float2 pair) { return __float22half2_rn(pair); }
};

// The sum of one pair of every source, in float32 and in the order of the ranks, rounded once. Of two
// sources the packed addition gives just that.
template <class Element, int kSources>
__device__ __forceinline__ uint32_t sum_pairs(const uint32_t (&pairs)[kSources]) {
  using Packed = typename Pair<Element>::Packed;
  Packed rounded;
  if constexpr (kSources == 2) {
    rounded = __hadd2(reinterpret_cast<const Packed&>(pairs[0]),
                      reinterpret_cast<const Packed&>(pairs[1]));
  } else {
    float2 sum = Pair<Element>::unpack(pairs[0]);
#pragma unroll
    for (int s = 1; s < kSources; s++) {
      const float2 pair = Pair<Element>::unpack(pairs[s]);
      sum.x += pair.x;
      sum.y += pair.y;
    }
    rounded = Pair<Element>::round(sum);
  }
  return reinterpret_cast<const uint32_t&>(rounded);
}

// Loads from the store buffer or a slot. A slot is read only once, so it need not pass through L1.
__device__ __forceinline__ uint4 load_chunk(const unsigned char* address) {
  uint4 value;
  asm volatile("ld.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// The value, which the compiler takes for a new one: what is computed from it does not occupy registers
// through a mainloop.
__device__ __forceinline__ int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Where a lane's chunks of a unit lie. A unit is 8 rows of 256 columns, or 16 rows of 128; in both a lane
// has a chunk of each of 8 rows that follow each other, always the same one as it lies in a slot, hence
// `chunk` XOR the row in the output.
struct LaneChunks {
  int first_row;  // of the item
  int panel, chunk;
};

template <class Config>
__device__ __forceinline__ LaneChunks lane_chunks(bool narrow, int unit, int lane) {
  if (narrow) {
    return {unit * Config::Narrow::kUnitRows + lane / 16 * 8, lane % 16 / 8, lane % 8};
  }
  return {unit * Config::Wide::kUnitRows, lane / 8, lane % 8};
}

// One warp sums one unit of at most kSources partials. A store covers whole rows of the item (512 bytes at
// 256 columns). As many loads as registers hold are under way at once, since L2 takes 2 us to answer beside
// a mainloop; and what counts next is the number of instructions, since one warp issues them slowly. `own`:
// the last of this rank's partials in the store buffer, or null if it lies in a slot too. `peer_output`
// of lane p is the output of rank p.
template <int kSources, class Config>
__device__ __forceinline__ void sum_unit_of(const FusedParams<Config>& params, uint64_t epoch,
                                            const TilePlace& place, int unit,
                                            const unsigned char* own, const void* peer_output) {
  constexpr int kNumRows = 8, kNumLoads = 16, kRowsAtOnce = kNumLoads / kSources;
  static_assert(kSources <= kMaxSources && kNumRows % kRowsAtOnce == 0);
  const PeerWindow& window = params.window;
  const int num_ranks = anew(window.num_ranks), num_sources = anew(params.num_sources);
  const int own_source = source_of(params, window.rank, params.split_k.value - 1);
  const auto [lane_row, panel, chunk] =
      lane_chunks<Config>(place.narrow, unit, anew(threadIdx.x % 32));
  const int in_item = chunk_offset(lane_row, panel * 8) + chunk * kChunkBytes;
  const size_t source_stride = static_cast<size_t>(params.slots_per_source) * params.slot_bytes;
  const unsigned char* partials = window.slots[window.rank] + (epoch & 1) * window.parity_bytes +
                                  static_cast<size_t>(place.slot) * params.slot_bytes;
  const size_t row_bytes = static_cast<size_t>(params.n) * 2;
  const int first_column = place.first_column + panel * kPanelColumns;
  const int num_rows = place.rows - lane_row,
            num_chunks = (params.n - first_column) / kChunkElements;

#pragma unroll 1
  for (int done = 0; done < kNumRows; done += kRowsAtOnce) {
    uint4 partial[kRowsAtOnce][kSources];
#pragma unroll
    for (int s = 0; s < kSources; s++) {
      const unsigned char* from =
          (own != nullptr && s == own_source ? own : partials + s * source_stride) + in_item +
          done * kPanelRowBytes;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; i++) {
        partial[i][s] = make_uint4(0, 0, 0, 0);
        if (s < num_sources && done + i < num_rows) {
          partial[i][s] = load_chunk(from + i * kPanelRowBytes);
        }
      }
    }
    uint4 sum[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; i++) {
      uint32_t x[kSources], y[kSources], z[kSources], w[kSources];
#pragma unroll
      for (int s = 0; s < kSources; s++) {
        x[s] = partial[i][s].x, y[s] = partial[i][s].y;
        z[s] = partial[i][s].z, w[s] = partial[i][s].w;
      }
      using Element = typename Config::Element;
      sum[i] = make_uint4(sum_pairs<Element>(x), sum_pairs<Element>(y), sum_pairs<Element>(z),
                          sum_pairs<Element>(w));
    }
    // The peers in turn, each rank starting behind itself and ending with itself: no two ranks store
    // to the same one first. ReduceScatter stores to itself only.
#pragma unroll 1
    for (int turn = Config::kOp == Op::kAllReduce ? 1 : num_ranks; turn <= num_ranks; turn++) {
      int peer = window.rank + turn;
      if (peer >= num_ranks) peer -= num_ranks;
      const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(peer_output), peer);
      unsigned char* row = reinterpret_cast<unsigned char*>(address) +
                           row_bytes * (place.output_row + lane_row + done) + first_column * 2;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; i++, row += row_bytes) {
        const int at = chunk ^ ((done + i) % 8);
        if (done + i < num_rows && at < num_chunks) {
          *reinterpret_cast<uint4*>(row + at * kChunkBytes) = sum[i];
        }
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void sum_unit(const FusedParams<Config>& params, uint64_t epoch,
                                         const TilePlace& place, int unit, const unsigned char* own,
                                         const void* peer_output) {
  if (params.num_sources <= 2) {
    sum_unit_of<2>(params, epoch, place, unit, own, peer_output);
  } else if (params.num_sources <= 4) {
    sum_unit_of<4>(params, epoch, place, unit, own, peer_output);
  } else {
    sum_unit_of<kMaxSources>(params, epoch, place, unit, own, peer_output);
  }
}

// A lane for each source waits until its partial of one of this rank's items has come, and with
// `outputs` lane p for rank p's start; returns the address of its output. The acquires are passed on to
// the other lanes' loads and stores by __syncwarp(). A peer's output address stays valid while this
// warp holds a unit: the peer's kernel of this epoch ends only when the unit has arrived.
template <class Config>
__device__ __forceinline__ const void* wait_partials(const FusedParams<Config>& params, int slot,
                                                     uint64_t epoch, bool outputs, bool own_too) {
  const PeerWindow& window = params.window;
  const int lane = anew(threadIdx.x % 32);
  const Span<Config> span(params, TraceKind::kWait, slot, lane == 0);
  const void* output = params.output;
  if (outputs && lane < window.num_ranks) output = wait_peer_output(window, lane, epoch);
  const int own_source = source_of(params, window.rank, params.split_k.value - 1);
  if (lane < params.num_sources && (own_too || lane != own_source)) {
    wait_epoch(window, window.control[window.rank]->tile_ready(slot, lane), epoch, kWaitTileReady,
               lane % params.order.num_ranks, slot);
  }
  __syncwarp();
  return output;
}

// Math warps: sums the item that they have just written to the store buffer. A warp sums the rows that
// it wrote itself.
template <class Config>
__device__ __forceinline__ void sum_own_item(const FusedParams<Config>& params,
                                             SharedStorage<Config>& shared,
                                             const TilePlace& place) {
  const int math_warp = anew(threadIdx.x - (kNumThreads - kNumMathThreads)) / 32;
  const void* peer_output =
      wait_partials(params, place.slot, shared.epoch, Config::kOp == Op::kAllReduce, false);
  const Span<Config> span(params, TraceKind::kReduce, place.slot, is_lane_0());
  const int num_units = place.narrow ? kRowsPerMathWarp / Config::Narrow::kUnitRows
                                     : kRowsPerMathWarp / Config::Wide::kUnitRows;
#pragma unroll 1
  for (int unit = 0; unit < num_units; unit++) {
    sum_unit(params, shared.epoch, place, math_warp * num_units + unit, shared.store_buffer,
             peer_output);
  }
  if (is_lane_0()) atomicAdd(&shared.num_units_stored, static_cast<uint32_t>(num_units));
}

// A unit of this rank's slots: units are dealt in the order of the slots.
struct ReduceUnit {
  int slot;
  int in_tile;
};

template <class Config>
__device__ __forceinline__ ReduceUnit reduce_unit_at(const FusedParams<Config>& params, int unit) {
  constexpr int kOfWhole = Config::Wide::kUnitsPerTile, kOfHalf = Config::Narrow::kUnitsPerTile;
  if (params.tile_n == Config::Narrow::kTileN) return {unit / kOfHalf, unit % kOfHalf};
  const int in_halves = unit - params.slots.num_whole * kOfWhole;
  if (in_halves < 0) return {unit / kOfWhole, unit % kOfWhole};
  return {params.slots.num_whole + in_halves / kOfHalf, in_halves % kOfHalf};
}

// Takes units until none is left. Units are dealt in the order of the slots, which is that of the
// items (of the other ranks, in ReduceScatter), so a waiting warp waits for the item that comes next.
// It waits only for items that a resident CTA has claimed or will claim without waiting for anyone:
// those CTAs never wait for units.
template <class Config>
__device__ __forceinline__ void reduce_role(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  ControlBlock* control = params.window.control[params.window.rank];
  const int lane = threadIdx.x % 32;
  const uint64_t epoch = shared.epoch;
  const void* peer_output = params.output;
  uint32_t num_stored = 0;
  for (;;) {
    int unit_idx = 0;
    if (lane == 0) unit_idx = atomicAdd(&control->next_unit, 1u);
    unit_idx = __shfl_sync(~0u, unit_idx, 0);
    const ReduceUnit unit = reduce_unit_at(params, unit_idx);
    if (unit.slot >= params.slots.num_sent) break;
    const bool first = num_stored == 0;
    const void* output =
        wait_partials(params, unit.slot, epoch, first && Config::kOp == Op::kAllReduce, true);
    if (first) peer_output = output;
    const Span<Config> span(params, TraceKind::kReduce, unit.slot, lane == 0);
    const TilePlace place = place_of_slot(params, unit.slot);
    sum_unit(params, epoch, place, unit.in_tile, nullptr, peer_output);
    num_stored++;
  }
  if (lane == 0 && num_stored != 0) atomicAdd(&shared.num_units_stored, num_stored);
}

}  // namespace entwine
