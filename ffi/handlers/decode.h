// What XLA hands to a handler, checked and in our own terms.
#pragma once

#include "launch/launch.h"
#include "xla/ffi/api/ffi.h"

namespace entwine {

// The attributes of every custom call; entwine_jax/lowering.py writes them.
struct Attributes {
  xla::ffi::Span<const int64_t> replica_groups;
  int64_t group_size;
  int64_t slot_bytes;
  int64_t num_batches;
  int64_t w_transposed;
  Schedule schedule;
};

// Throw InvalidCall where shapes or dtypes do not fit together: they give the sizes of memory.
Call decode_allreduce(const Attributes& attributes, const xla::ffi::AnyBuffer& x,
                      const xla::ffi::AnyBuffer& w, xla::ffi::AnyBuffer& y);
Call decode_reducescatter(const Attributes& attributes, const xla::ffi::AnyBuffer& x,
                          const xla::ffi::AnyBuffer& w, xla::ffi::AnyBuffer& y);
Call decode_allgather(const Attributes& attributes, const xla::ffi::AnyBuffer& x,
                      const xla::ffi::AnyBuffer& w, xla::ffi::AnyBuffer& y,
                      xla::ffi::AnyBuffer& gathered);

}  // namespace entwine

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    entwine::Schedule, ::xla::ffi::StructMember<int64_t>("tile_m"),
    ::xla::ffi::StructMember<int64_t>("tile_n"), ::xla::ffi::StructMember<int64_t>("num_comm_ctas"),
    ::xla::ffi::StructMember<int64_t>("num_senders"),
    ::xla::ffi::StructMember<int64_t>("num_spare_warps"),
    ::xla::ffi::StructMember<int64_t>("raster"), ::xla::ffi::StructMember<int64_t>("push_spread"),
    ::xla::ffi::StructMember<int64_t>("narrow_tail"), ::xla::ffi::StructMember<int64_t>("split_k"),
    ::xla::ffi::StructMember<int64_t>("rows_per_launch"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    entwine::Attributes,
    ::xla::ffi::StructMember<::xla::ffi::Span<const int64_t>>("replica_groups"),
    ::xla::ffi::StructMember<int64_t>("group_size"),
    ::xla::ffi::StructMember<int64_t>("slot_bytes"),
    ::xla::ffi::StructMember<int64_t>("num_batches"),
    ::xla::ffi::StructMember<int64_t>("w_transposed"),
    ::xla::ffi::StructMember<entwine::Schedule>("schedule"));
