// The communication role of AllGather: send this rank's rows to every rank's gathered x, piece by piece,
// with a flag for each. Played by the first spare warp of some CTAs from the first moment of the
// launch: as many as the schedule says. Too few do not fill the links in time; with too many, the
// mainloops' loads wait behind the stores.
//
// A piece is what a tile needs for a part of its mainloop: the rows of a tile row, kGatherColumns
// columns of k. Tiles that are computed at the same time so start with the first columns of all their
// rows, and go on at the pace of the links, instead of waiting for whole rows.
#pragma once

#include "kernels/shared_storage.cuh"
#include "ptx/bulk_copy.cuh"

namespace entwine {

constexpr int kPieceRowBytes = kGatherColumns * 2;  // of 16 bits
static_assert(kStagingBytes == kStagingSlots * kPieceRowBytes);

// Rows that a sender claims and counts at a time. Counting takes as long as sending four rows.
constexpr int kRowsPerUnit = 8;
static_assert(kRowsPerUnit % (2 * kStagingSlots) == 0, "every unit begins with the same phase");

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

// Where the rows of a unit are and go to, in bytes.
struct UnitRows {
  const unsigned char* source;
  size_t offset;       // in every rank's gathered x
  uint32_t num_bytes;  // of a row
  int num_rows;
  int slot;  // of the flag of its piece; negative: there are no more units
  int tile_row;
};

template <class Config>
__device__ __forceinline__ UnitRows unit_rows(const FusedParams<Config>& params, int unit_idx,
                                              int num_tile_rows, int num_parts, int rows_of_band) {
  constexpr int kElementBytes = sizeof(typename Config::Element);
  const PeerWindow& window = params.window;
  const GatherUnit unit = gather_unit(unit_idx, num_tile_rows, num_parts, rows_of_band, kTileM);
  const auto [batch, row, valid_rows] = row_in_block(unit.tile_row, params.order);
  const size_t block_rows = params.block_rows.value;
  const size_t row_bytes = static_cast<size_t>(params.k) * kElementBytes;
  const size_t in_shard = batch * block_rows + row + unit.row;
  const size_t in_gathered = (batch * window.num_ranks + window.rank) * block_rows + row + unit.row;
  const int first_column = unit.column_part * kGatherColumns;
  const size_t in_row = static_cast<size_t>(first_column) * kElementBytes;
  return {static_cast<const unsigned char*>(params.x) + in_shard * row_bytes + in_row,
          in_gathered * row_bytes + in_row,
          static_cast<uint32_t>(min(kGatherColumns, params.k - first_column) * kElementBytes),
          max(min(kRowsPerUnit, valid_rows - unit.row), 0),
          piece_slot(unit.tile_row, unit.column_part, num_parts),
          unit.tile_row};
}

// All from here to the role itself is for one thread.

// Starts the load of a row into its slot, which has been read. Without such a row the slot is full at once.
template <class Config>
__device__ __forceinline__ void load_row(SharedStorage<Config>& shared, unsigned char* staging,
                                         const UnitRows& rows, size_t row_bytes, int row) {
  const int slot = row % kStagingSlots;
  uint64_t* full = &shared.staging_full[slot];
  const bool exists = row < rows.num_rows;
  ptx::mbarrier_arrive_expect(full, exists ? rows.num_bytes : 0);
  if (exists) {
    ptx::bulk_load(staging + slot * kPieceRowBytes, rows.source + row * row_bytes, rows.num_bytes,
                   full);
  }
}

// Copies a row to the same place of every rank's gathered x, this rank's last.
template <class Config>
__device__ __forceinline__ void send_row(const PeerWindow& window,
                                         const SharedStorage<Config>& shared,
                                         const unsigned char* row, size_t offset,
                                         uint32_t num_bytes) {
  for (int turn = 1; turn <= window.num_ranks; turn++) {
    int peer = window.rank + turn;
    if (peer >= window.num_ranks) peer -= window.num_ranks;
    ptx::bulk_store(shared.peer_output[peer] + offset, row, num_bytes);
  }
}

// Counts a unit whose copies are complete. The count that completes a piece tells the peers.
//
// A sender's copies (async proxy) are complete, so they come before its count (generic proxy), which
// releases them. The last count acquires all of them; with the fence behind it they come before the flags,
// which the peers acquire at system scope and behind which they have a proxy fence of their own
// (wait_rows). The proxy fence here guards the slots a second time, beside the boundaries of kernels
// (finish_cta). GPU scope is enough for the counts, as all senders are on this GPU: what they order is
// passed on by the fence at system scope.
__device__ __forceinline__ void count_unit(const PeerWindow& window, uint64_t epoch, int slot) {
  constexpr uint32_t kUnitsPerPiece = kTileM / kRowsPerUnit;
  ptx::fence_proxy_async_global();
  uint32_t* sent = window.control[window.rank]->units_sent(slot, window.max_slots);
  if (ptx::add_acq_rel_gpu(sent, 1) + 1 < kUnitsPerPiece) return;
  *sent = 0;  // the next count is of the next launch
  ptx::fence_system();
  for (int peer = 0; peer < window.num_ranks; peer++) {
    if (peer == window.rank) continue;
    ptx::store_relaxed_system(window.control[peer]->rows_ready(slot, window.rank), epoch);
  }
}

// Takes units until none is left. While a row is on its way out the next ones are on their way in, those of
// the next unit too; and a unit is counted when the next one is on its way out. Waits for nothing but the
// start of the peers' kernels.
//
// What limits a sender is the time that it takes to issue all this. The compiler has to see that it is
// one thread, or it loops over the lanes for each copy.
template <class Config>
__device__ __forceinline__ void gather_role(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  const PeerWindow& window = params.window;
  const int num_rows = num_tile_rows(params.order.blocks, kTileM);
  const int num_parts = num_column_parts(params.k);
  const int num_units = num_rows * num_parts * (kTileM / kRowsPerUnit);
  // A band of the raster holds so many tile rows of each of the other ranks.
  const int rows_of_band =
      min(ceil_div(params.order.raster.rows_of_band.value, window.num_ranks - 1), num_rows);
  const size_t row_bytes = static_cast<size_t>(params.k) * sizeof(typename Config::Element);
  unsigned char* stage = staging(shared, params.tile_n);
  const auto claim = [&] { return atomicAdd(&window.control[window.rank]->next_unit, 1u); };
  const auto rows_of = [&](uint32_t unit_idx) {
    if (unit_idx >= num_units) return UnitRows{nullptr, 0, 0, 0, -1, -1};
    return unit_rows(params, unit_idx, num_rows, num_parts, rows_of_band);
  };

  UnitRows unit{};
  if (cute::elect_one_sync()) {
    unit = rows_of(claim());
    for (int row = 0; unit.slot >= 0 && row < kStagingSlots - 1; row++) {
      load_row(shared, stage, unit, row_bytes, row);
    }
  }
  const int lane = threadIdx.x % 32;
  if (lane < window.num_ranks) {
    shared.peer_output[lane] =
        static_cast<unsigned char*>(wait_peer_output(window, lane, shared.epoch));
    // What the peer did with its gathered x before comes before the copies.
    ptx::fence_proxy_async_global();
  }
  __syncwarp();
  if (cute::elect_one_sync()) {
    int sent_slot = -1;  // of the unit before
    uint32_t claimed = unit.slot >= 0 ? claim() : 0;
    while (unit.slot >= 0) {
      const UnitRows next = rows_of(claimed);
      if (next.slot >= 0) claimed = claim();  // it takes a while
      const Span<Config> span(params, TraceKind::kSend, unit.tile_row, true);
      for (int row = 0; row < kRowsPerUnit; row++) {
        const int slot = row % kStagingSlots;
        wait_phase(window, &shared.staging_full[slot], row / kStagingSlots & 1);
        if (row < unit.num_rows) {
          send_row(window, shared, stage + slot * kPieceRowBytes, unit.offset + row * row_bytes,
                   unit.num_bytes);
        }
        ptx::bulk_commit();
        // The row before has been read, so its slot can be filled.
        ptx::bulk_wait_source_read<1>();
        const int ahead = row + kStagingSlots - 1;
        if (ahead < kRowsPerUnit) {
          load_row(shared, stage, unit, row_bytes, ahead);
        } else if (next.slot >= 0) {
          load_row(shared, stage, next, row_bytes, ahead - kRowsPerUnit);
        }
        if (row == kStagingSlots - 1 && sent_slot >= 0) {
          ptx::bulk_wait_complete<kStagingSlots>();
          count_unit(window, shared.epoch, sent_slot);
        }
      }
      sent_slot = unit.slot;
      unit = next;
    }
    ptx::bulk_wait_complete<0>();
    if (sent_slot >= 0) count_unit(window, shared.epoch, sent_slot);
  }
  __syncwarp();
}

}  // namespace entwine
