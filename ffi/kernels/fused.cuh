// The fused kernel: one persistent launch per GPU and call. Gives every warp its role.
//
// Progress does not depend on how many CTAs are resident: roles are dealt by arrival and work by
// counters, there is no barrier across the grid, and whoever waits, waits only for work that a
// resident CTA is already doing, or that a peer's kernel does with no more of this one than it has by
// then. Nor is a wait cyclic. A CTA that sums its item p itself waits for the peers' p, and every CTA
// takes items in its rank's order. AllReduce: the same order on all ranks, so a peer is held up before
// p only in an earlier item, and the first one that is waited for comes. ReduceScatter: a rank waits
// only in its own last items, after all items of the others. Units are of items before any wait.
//
// Every wait of ours ends at the deadline, or at twice it where it is for warps of the same CTA
// (peer/signal.cuh). The waits inside CUTLASS's operand pipeline
// do not, but they are for warps of the same CTA, and whatever those wait for themselves is bounded.
#pragma once

#include "kernels/comm.cuh"
#include "kernels/gather.cuh"
#include "kernels/gemm.cuh"

namespace entwine {

// One thread of each CTA. The first CTA to arrive always computes; only then do communication CTAs take
// their role, so tiles are made however few CTAs there are. AllGather's senders are the CTAs whose first
// items come last: those have to wait for rows, or have no item at all, and their copy engines are
// free at first. Item 0 is claimed by a CTA that is resident, so there is always a sender where there
// is a peer.
template <class Config>
__device__ __forceinline__ void start_cta(const FusedParams<Config>& params,
                                          SharedStorage<Config>& shared) {
  ControlBlock* control = params.window.control[params.window.rank];
  int arrival = 0;
  if (params.num_comm_ctas > 0) arrival = atomicAdd(&control->next_cta, 1u);
  const bool communicates = arrival >= 1 && arrival <= params.num_comm_ctas;
  // Both are under way before either is used.
  const uint64_t last_epoch = ptx::load_relaxed_gpu(&control->epoch);
  const int first_item = communicates ? -1 : claim_item(params);
  ptx::mbarrier_init(&shared.buffer_full, kNumMathWarps);
  ptx::mbarrier_init(&shared.buffer_empty, 1);
  for (uint64_t& full : shared.staging_full) ptx::mbarrier_init(&full, 1);
  for (int i = 0; i < kWorkRing; i++) {
    ptx::mbarrier_init(&shared.work_full[i], 1);
    ptx::mbarrier_init(&shared.work_empty[i], (kNumMathWarps + 1) * 32);  // and the push warp
  }
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.x_map));
  cute::prefetch_tma_descriptor(params.wide.tma_load_b.get_tma_descriptor());
  cute::prefetch_tma_descriptor(params.narrow.tma_load_b.get_tma_descriptor());
  cutlass::arch::fence_barrier_init();
  shared.num_units_stored = 0;
  shared.epoch = last_epoch + 1;
  shared.first_item = first_item;
  const bool is_last = first_item > static_cast<int>(gridDim.x) - params.num_senders;
  shared.sends = params.window.num_ranks > 1 && (first_item == 0 || is_last);
}

// The communication role of a warp; AllGather has one that sends, in some CTAs.
template <class Config>
__device__ __forceinline__ void communicate(const FusedParams<Config>& params,
                                            SharedStorage<Config>& shared) {
  if constexpr (Config::kOp != Op::kAllGather) reduce_role(params, shared);
}

template <class Tile>
__device__ __forceinline__ typename Tile::Pipeline make_pipeline(
    typename Tile::Mainloop::PipelineStorage& storage, int x_box_bytes) {
  using Pipeline = typename Tile::Pipeline;
  typename Pipeline::Params params;
  params.role = cutlass::canonical_warp_group_idx() == 0 ? Pipeline::ThreadCategory::Producer
                                                         : Pipeline::ThreadCategory::Consumer;
  params.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
  params.num_consumers = kNumMathThreads;
  params.num_producers = 1;
  params.transaction_bytes = x_box_bytes + Tile::kTileN * kTileK * 2;
  return Pipeline(storage, params, typename Tile::ClusterShape{});
}

// AllReduce: tells every rank how much this CTA has stored there. The last CTA of the rank waits until
// the rank's own output is complete, and prepares the counters for the next launch. (ReduceScatter and
// AllGather: when all CTAs are done, so is the output.)
//
// Why nothing is overwritten before it was read, whatever the ops and sizes of consecutive calls:
//   A rank ends epoch e only when it has received something that every rank sends in e (AllReduce: tiles
//   that every rank has pushed a partial of; ReduceScatter: partials of its own tiles; AllGather: rows).
//   So every rank has started e by then, and has ended e - 1.
//   Slots: whoever pushes in e + 1 has ended e, hence every rank has ended e - 1, whose slots have the
//   same parity. (ReduceScatter needs the two parities and a tile for every rank; AllReduce does not.)
//   Slots are read in e by loads (generic proxy) and overwritten in e + 2 by copies (async proxy).
//   Between them lie the end of the reader's kernel of e and the start of that of e + 1, which order the
//   accesses of both proxies (PTX ISA, causality order), and what that one sends to every rank.
//   Flags hold epochs and only grow, and each is set by one rank (source_of); one that is ahead of the
//   reader's epoch was set by a source that has ended it, and so has sent what the reader waits for.
//   Outputs and the gathered x are stored to only after ReadyWord says that the peer's kernel of this
//   epoch runs, and it ends only when all of it has arrived. A ReadyWord is set again in the next epoch
//   of the peer, thus when no unit that still needs it is left.
template <class Config>
__device__ __forceinline__ void finish_cta(const FusedParams<Config>& params,
                                           SharedStorage<Config>& shared) {
  const PeerWindow& window = params.window;
  ControlBlock* control = window.control[window.rank];
  __syncthreads();
  if (threadIdx.x != 0) return;
  constexpr bool kCounts = Config::kOp == Op::kAllReduce;
  if (kCounts && shared.num_units_stored != 0) {
    // Cumulative over the barrier above: the stores of all warps of this CTA come before the counts.
    ptx::fence_system();
    for (int peer = 0; peer < window.num_ranks; peer++) {
      ptx::add_relaxed_system(&window.control[peer]->arrived, shared.num_units_stored);
    }
  }
  // Released by every CTA that is done with the counters, acquired by the one that sets them back.
  if (ptx::add_acq_rel_gpu(&control->exited, 1) + 1 < gridDim.x) return;
  if (kCounts) {
    const uint64_t expected = control->arrived_base + params.num_units;
    const Span<Config> span(params, TraceKind::kFinish, -1, true);
    wait_arrived(window, expected);
    control->arrived_base = expected;
  }
  control->next_item = control->next_unit = control->next_cta = control->exited = 0;
  control->epoch = shared.epoch;
}

template <class Config>
__global__ void __launch_bounds__(kNumThreads, 1)
    fused_kernel(const __grid_constant__ FusedParams<Config> params) {
  using Wide = typename Config::Wide;
  using Narrow = typename Config::Narrow;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_memory);
  const int warp = cutlass::canonical_warp_idx_sync();
  const int warpgroup = cutlass::canonical_warp_group_idx();
  const Span<Config> span(params, TraceKind::kCta, -1, threadIdx.x == 0);

  if (threadIdx.x == 0) start_cta(params, shared);
  auto wide_pipeline = make_pipeline<Wide>(shared.wide_pipeline, params.x_box_bytes);
  auto narrow_pipeline = make_pipeline<Narrow>(shared.narrow_pipeline, params.x_box_bytes);
  __syncthreads();

  // Item 0 is claimed once per launch; a warp that has nothing to do yet, a lane per peer.
  if (shared.first_item == 0 && warp == 3 && threadIdx.x % 32 < params.window.num_ranks) {
    set_ready(params.window, threadIdx.x % 32, params.shared_output, shared.epoch);
  }
  __syncwarp();

  if (shared.first_item < 0) {
    communicate(params, shared);
  } else if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kAuxiliaryRegisters>();
    if (warp == 0) {
      load_role(params, shared, OperandRing<Wide>{params.wide, wide_pipeline, shared.wide},
                OperandRing<Narrow>{params.narrow, narrow_pipeline, shared.narrow});
    } else if (warp == 1) {
      push_role(params, shared);
    }
    if constexpr (Config::kOp == Op::kAllGather) {
      if (warp == kFirstSpareWarp && shared.sends) gather_role(params, shared);
    }
    if (warp < kFirstSpareWarp + params.num_spare_warps) communicate(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMathRegisters>();
    math_role(params, shared, wide_pipeline, narrow_pipeline);
    communicate(params, shared);
  }
  finish_cta(params, shared);
}

}  // namespace entwine
