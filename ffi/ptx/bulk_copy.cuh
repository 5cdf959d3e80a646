// Bulk copies between shared and global memory (stores also to a peer's), and the store that fills their
// source: one instruction per function.
#pragma once

#include <cstdint>

namespace entwine::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The bytes arrive at `barrier`, which has to expect them. Addresses and `num_bytes` are multiples of
// 16, here and below.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t num_bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
}

// Loads a box of the tensor of `map` from (x, y) on; what lies outside is 0. The bytes of the whole box
// arrive at `barrier`, which has to expect them.
__device__ __forceinline__ void tensor_load_2d(const void* map, void* shared, int x, int y,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
      : "memory");
}

// Stores a box to the tensor of `map` at (x, y, z), fastest first; what lies outside is left out.
__device__ __forceinline__ void tensor_store_3d(const void* map, const void* shared, int x, int y,
                                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All committed copies of this thread but the last kPending groups have read their source: the buffer may be
// written again. Nothing is said about the destination.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_source_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All committed copies of this thread but the last kPending groups are complete: the destination is written.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_complete() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t shared, uint32_t r0, uint32_t r1,
                                                uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace entwine::ptx
