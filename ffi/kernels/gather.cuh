// The communication role of AllGather: send this rank's rows to every rank's gathered x, piece by piece,
// with a flag for each. Played by the first spare warp of some CTAs from the first moment of the
// launch: as many as it takes to fill the links. More would fill the queues before the links, and
// the mainloops' loads would wait behind the stores.
//
// A piece is what a tile needs for a part of its mainloop: the rows of a tile row, kGatherColumns
// columns of k. Tiles that are computed at the same time so start with the first columns of all their
// rows, and go on at the pace of the links, instead of waiting for whole rows.
#pragma once

#include "kernels/shared_storage.cuh"
#include "ptx/bulk_copy.cuh"

namespace entwine {

constexpr int kPieceRowBytes = kGatherColumns * 2;            // of 16 bits
constexpr int kRowsPerUnit = kStagingBytes / kPieceRowBytes;  // what a sender holds at a time

// One unit: kRowsPerUnit rows of a piece.
struct GatherUnit {
  int tile_row;
  int column_part;
  int row;  // first row within the tile row
};

// The order of sending: bands of tile rows that are computed together; inside a band all rows of the
// first columns, then of the next.
__device__ __forceinline__ GatherUnit gather_unit(int unit, int num_tile_rows, int num_parts,
                                                  int rows_of_band, int tile_m) {
  const int units_of_piece = tile_m / kRowsPerUnit;
  const int units_of_band = rows_of_band * num_parts * units_of_piece;
  const int band = unit / units_of_band;
  const int first_row = band * rows_of_band;
  const int rows = min(rows_of_band, num_tile_rows - first_row);
  const int in_band = unit - band * units_of_band;
  const int in_part = in_band % (rows * units_of_piece);
  return {first_row + in_part / units_of_piece, in_band / (rows * units_of_piece),
          in_part % units_of_piece * kRowsPerUnit};
}

// Copies `num_rows` rows of a piece through the staging memory to the same place of every rank's
// gathered x. `peer_output` of lane p is that of rank p. On return all of it is written at the peers; the
// own copy, for which nobody waits, may still be under way.
template <class Config>
__device__ __forceinline__ void send_rows(const PeerWindow& window, SharedStorage<Config>& shared,
                                          unsigned char* staging, const unsigned char* source,
                                          size_t offset, size_t row_bytes, int num_rows,
                                          uint32_t num_bytes, const void* peer_output,
                                          uint32_t phase) {
  const bool leads = threadIdx.x % 32 == 0;
  if (leads) {
    ptx::mbarrier_arrive_expect(&shared.staging_full, num_rows * num_bytes);
    for (int r = 0; r < num_rows; r++) {
      ptx::bulk_load(staging + r * kPieceRowBytes, source + r * row_bytes, num_bytes,
                     &shared.staging_full);
    }
  }
  wait_phase(window, &shared.staging_full, phase);
  for (int turn = 1; turn <= window.num_ranks; turn++) {
    int peer = window.rank + turn;
    if (peer >= window.num_ranks) peer -= window.num_ranks;
    const uint64_t address = __shfl_sync(~0u, reinterpret_cast<uint64_t>(peer_output), peer);
    if (leads) {
      unsigned char* destination = reinterpret_cast<unsigned char*>(address) + offset;
      for (int r = 0; r < num_rows; r++) {
        ptx::bulk_store(destination + r * row_bytes, staging + r * kPieceRowBytes, num_bytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_source_read();
    }
  }
  // The last group is the own copy.
  if (leads) ptx::bulk_wait_complete_but_last();
  __syncwarp();
}

// Takes units until none is left. Waits for nothing but the start of the peers' kernels.
template <class Config>
__device__ __forceinline__ void gather_role(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  constexpr int kElementBytes = sizeof(typename Config::Element);
  const PeerWindow& window = params.window;
  ControlBlock* control = window.control[window.rank];
  const int lane = threadIdx.x % 32;
  const int num_rows = num_tile_rows(params.order.blocks, kTileM);
  const int num_parts = num_column_parts(params.k);
  constexpr int kUnitsPerPiece = kTileM / kRowsPerUnit;
  const int num_units = num_rows * num_parts * kUnitsPerPiece;
  // A band of the raster holds so many tile rows of each of the other ranks.
  const int rows_of_band =
      min(ceil_div(params.order.raster.rows_of_band.value, window.num_ranks - 1), num_rows);
  const size_t row_bytes = static_cast<size_t>(params.k) * kElementBytes;
  const void* peer_output = nullptr;
  uint32_t phase = 0;
  for (;;) {
    int unit_idx = 0;
    if (lane == 0) unit_idx = atomicAdd(&control->next_unit, 1u);
    unit_idx = __shfl_sync(~0u, unit_idx, 0);
    if (unit_idx >= num_units) break;
    if (peer_output == nullptr && lane < window.num_ranks) {
      peer_output = wait_peer_output(window, lane, shared.epoch);
    }
    __syncwarp();
    const GatherUnit unit = gather_unit(unit_idx, num_rows, num_parts, rows_of_band, kTileM);
    const auto [batch, row, valid_rows] = row_in_block(unit.tile_row, params.order);
    const int rows_of_unit = min(kRowsPerUnit, valid_rows - unit.row);
    if (rows_of_unit > 0) {
      const Span<Config> span(params, TraceKind::kSend, unit.tile_row, lane == 0);
      const size_t block_rows = params.block_rows.value;
      const size_t in_shard = batch * block_rows + row + unit.row;
      const size_t in_gathered =
          (batch * window.num_ranks + window.rank) * block_rows + row + unit.row;
      const int first_column = unit.column_part * kGatherColumns;
      const int columns = min(kGatherColumns, params.k - first_column);
      const size_t in_row = static_cast<size_t>(first_column) * kElementBytes;
      send_rows(window, shared, staging(shared, params.tile_n),
                static_cast<const unsigned char*>(params.x) + in_shard * row_bytes + in_row,
                in_gathered * row_bytes + in_row, row_bytes, rows_of_unit, columns * kElementBytes,
                peer_output, phase);
      phase ^= 1;
    }
    // The sender of the last unit of a piece tells the peers. Every sender's copies (async proxy) come
    // before its proxy fence, that and the fence at system scope before its count; the fence behind
    // the count passes all of them on to the release of the flags.
    const int slot = piece_slot(unit.tile_row, unit.column_part, num_parts);
    bool complete = false;
    if (lane == 0) {
      ptx::fence_proxy_async_global();
      ptx::fence_system();
      uint32_t* sent = control->units_sent(slot, window.max_slots);
      complete = atomicAdd(sent, 1u) + 1 == kUnitsPerPiece;
      if (complete) {
        ptx::fence_system();
        *sent = 0;
      }
    }
    complete = __shfl_sync(~0u, complete, 0);
    __syncwarp();  // orders lane 0's fence before the other lanes' releases
    if (complete && lane < window.num_ranks && lane != window.rank) {
      ptx::store_release_system(window.control[lane]->rows_ready(slot, window.rank), shared.epoch);
    }
  }
  if (lane == 0) ptx::bulk_wait_complete();
  __syncwarp();
}

}  // namespace entwine
