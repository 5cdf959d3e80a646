#include "handlers/decode.h"

namespace entwine {
namespace {

using xla::ffi::AnyBuffer;

Dtype dtype_of(const AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case xla::ffi::BF16:
      return Dtype::kBfloat16;
    case xla::ffi::F16:
      return Dtype::kFloat16;
    default:
      throw InvalidCall("x: the dtype must be bfloat16 or float16");
  }
}

void require_shape(const char* name, const AnyBuffer& buffer, const AnyBuffer& x, int64_t rows,
                   int64_t columns) {
  const auto dimensions = buffer.dimensions();
  if (buffer.element_type() != x.element_type()) {
    throw InvalidCall(std::string(name) + ": the dtype must be that of x");
  }
  if (dimensions.size() != 2 || dimensions[0] != rows || dimensions[1] != columns) {
    throw InvalidCall(std::string(name) + ": the shape must be [" + std::to_string(rows) + ", " +
                      std::to_string(columns) + "]");
  }
}

// Everything but the gathered x; the shape of y is not checked.
Call decode_operands(Op op, const Attributes& attributes, const AnyBuffer& x, const AnyBuffer& w,
                     AnyBuffer& y, int64_t ranks_in_rows) {
  const auto x_size = x.dimensions(), w_size = w.dimensions();
  if (x_size.size() != 2 || w_size.size() != 2) throw InvalidCall("x, w: must have 2 dimensions");
  const bool transposed = attributes.w_transposed != 0;
  const int64_t k = x_size[1], n = w_size[transposed ? 0 : 1];
  require_shape("w", w, x, transposed ? n : k, transposed ? k : n);
  if (attributes.group_size < 1) throw InvalidCall("group_size: must be positive");
  return {op,
          dtype_of(x),
          x.untyped_data(),
          w.untyped_data(),
          y.untyped_data(),
          nullptr,
          x_size[0] * ranks_in_rows,
          n,
          k,
          attributes.num_batches,
          transposed};
}

}  // namespace

Call decode_allreduce(const Attributes& attributes, const AnyBuffer& x, const AnyBuffer& w,
                      AnyBuffer& y) {
  const Call call = decode_operands(Op::kAllReduce, attributes, x, w, y, 1);
  require_shape("y", y, x, call.m, call.n);
  return call;
}

Call decode_reducescatter(const Attributes& attributes, const AnyBuffer& x, const AnyBuffer& w,
                          AnyBuffer& y) {
  const Call call = decode_operands(Op::kReduceScatter, attributes, x, w, y, 1);
  if (call.m % attributes.group_size != 0) throw InvalidCall("x: the ranks must divide its rows");
  require_shape("y", y, x, call.m / attributes.group_size, call.n);
  return call;
}

Call decode_allgather(const Attributes& attributes, const AnyBuffer& x, const AnyBuffer& w,
                      AnyBuffer& y, AnyBuffer& gathered) {
  if (attributes.group_size < 2) throw InvalidCall("group_size: must be at least 2");
  Call call = decode_operands(Op::kAllGather, attributes, x, w, y, attributes.group_size);
  require_shape("y", y, x, call.m, call.n);
  require_shape("gathered", gathered, x, call.m, call.k);
  call.gathered = gathered.untyped_data();
  return call;
}

}  // namespace entwine
