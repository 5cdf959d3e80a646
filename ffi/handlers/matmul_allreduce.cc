// Decodes the call, rechecks what could corrupt memory, hands on. Nothing is allocated,
// synchronised or sent through NCCL in Execute: the workspace is made in Initialize, once per
// group.
#include "handlers/matmul_allreduce.h"

#include <cuda_runtime_api.h>

#include <exception>
#include <mutex>
#include <string>

#include "handlers/communicator.h"
#include "launch/launch.h"
#include "peer/workspace.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(entwine::Schedule,
                                      ::xla::ffi::StructMember<int64_t>("tile_m"),
                                      ::xla::ffi::StructMember<int64_t>("tile_n"),
                                      ::xla::ffi::StructMember<int64_t>("num_comm_ctas"),
                                      ::xla::ffi::StructMember<int64_t>("num_spare_warps"),
                                      ::xla::ffi::StructMember<int64_t>("raster"),
                                      ::xla::ffi::StructMember<int64_t>("push_spread"),
                                      ::xla::ffi::StructMember<int64_t>("rows_per_launch"));

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using Ids = ffi::Span<const int64_t>;

// No exception of ours crosses into XLA.
template <class Body>
ffi::Error guarded(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error::InvalidArgument(std::string("matmul_allreduce: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("matmul_allreduce: ") + error.what());
  }
}

// The current device of the calling thread, restored on exit.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

void load_kernels_once(int device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag loaded[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("too many devices");
  std::call_once(loaded[device], load_kernels);
}

ffi::Error prepare(int32_t device, const Collectives::Type& collectives, Ids replica_groups,
                   int64_t group_size, int64_t, Schedule) {
  return guarded([&] {
    const DeviceScope scope(device);
    load_kernels_once(device);
    NcclExchange::prepare();
    ReplicaGroups(replica_groups, group_size).request(collectives);
  });
}

ffi::Error initialize(cudaStream_t stream, int32_t device, const Collectives::Type& collectives,
                      Ids replica_groups, int64_t group_size, int64_t slot_bytes, Schedule) {
  return guarded([&] {
    const DeviceScope scope(device);
    void* communicator = ReplicaGroups(replica_groups, group_size).communicator(collectives);
    NcclExchange exchange(communicator, stream);
    if (const Workspace* known = find_workspace(communicator)) {
      // XLA may have given the address of a communicator that it had destroyed to a new one.
      if (known->window.rank != exchange.rank() ||
          known->window.num_ranks != exchange.num_ranks() || known->device != device) {
        throw std::runtime_error("the communicators of XLA have changed; start the process anew");
      }
      return;
    }
    if (exchange.num_ranks() != group_size) {
      throw InvalidCall("group_size=" + std::to_string(group_size) + ": XLA's communicator has " +
                        std::to_string(exchange.num_ranks()) + " ranks");
    }
    if (slot_bytes < 1) throw InvalidCall("slot_bytes: must be positive");
    make_workspace(communicator, slot_bytes, exchange);
  });
}

Dtype dtype_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::BF16:
      return Dtype::kBfloat16;
    case ffi::F16:
      return Dtype::kFloat16;
    default:
      throw InvalidCall("x: the dtype must be bfloat16 or float16");
  }
}

Operands decode(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, ffi::AnyBuffer& y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y.dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] != ws[0] || ys[0] != xs[0] ||
      ys[1] != ws[1]) {
    throw InvalidCall("x, w: shapes must be [m, k], [k, n] with a result [m, n]");
  }
  if (w.element_type() != x.element_type() || y.element_type() != x.element_type()) {
    throw InvalidCall("x, w: dtypes must be the same");
  }
  return {x.untyped_data(), w.untyped_data(), y.untyped_data(), dtype_of(x), xs[0], ws[1], xs[1]};
}

ffi::Error execute(cudaStream_t stream, int32_t device, const Collectives::Type& collectives,
                   ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                   Ids replica_groups, int64_t group_size, int64_t, Schedule schedule) {
  return guarded([&] {
    const std::string failure = last_failure();
    if (!failure.empty()) throw std::runtime_error(failure);
    const DeviceScope scope(device);
    const Operands operands = decode(x, w, *y);
    void* communicator = ReplicaGroups(replica_groups, group_size).communicator(collectives);
    const Workspace* workspace = find_workspace(communicator);
    if (workspace == nullptr) throw std::runtime_error("Initialize made no workspace");
    PeerWindow window = workspace->window;
    window.deadline_ns = deadline_ns();
    launch_matmul_allreduce(operands, schedule, window, workspace->num_sms, stream);
  });
}

template <class Binding>
auto bind_attributes(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<Ids>("replica_groups")
      .template Attr<int64_t>("group_size")
      .template Attr<int64_t>("slot_bytes")
      .template Attr<Schedule>("schedule");
}

}  // namespace

XLA_FFI_Error* matmul_allreduce_prepare(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      bind_attributes(
          ffi::Ffi::BindPrepare().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::Extension<Collectives>>())
          .To(prepare)
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* matmul_allreduce_initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = bind_attributes(ffi::Ffi::BindInitialize()
                                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                             .Ctx<ffi::DeviceOrdinal>()
                                             .Ctx<ffi::Extension<Collectives>>())
                             .To(initialize)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* matmul_allreduce_execute(XLA_FFI_CallFrame* frame) {
  static auto* handler = bind_attributes(ffi::Ffi::Bind()
                                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                             .Ctx<ffi::DeviceOrdinal>()
                                             .Ctx<ffi::Extension<Collectives>>()
                                             .Arg<ffi::AnyBuffer>()
                                             .Arg<ffi::AnyBuffer>()
                                             .Ret<ffi::AnyBuffer>())
                             .To(execute)
                             .release();
  return handler->Call(frame);
}

}  // namespace entwine
