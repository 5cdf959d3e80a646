// Decodes the call, rechecks what could corrupt memory, hands on. Nothing is allocated, synchronised or
// sent through NCCL in Execute: the workspace is made in Initialize, once for a group and its share.
#include "handlers/handlers.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "handlers/communicator.h"
#include "handlers/decode.h"
#include "handlers/failed_runs.h"
#include "launch/device_scope.h"
#include "launch/launch.h"
#include "peer/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using Extension = const Collectives::Type&;

// No exception of ours crosses into XLA.
template <class Body>
ffi::Error guarded(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error::InvalidArgument(std::string("entwine_jax: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("entwine_jax: ") + error.what());
  }
}

void load_kernels_once(int device) {
  constexpr int kMaxDevices = 64;
  static struct {
    std::mutex mutex;
    bool loaded = false;
  } of_device[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("too many devices");
  auto& [mutex, loaded] = of_device[device];
  const std::lock_guard lock(mutex);
  if (!loaded) load_kernels();
  loaded = true;
}

ffi::Error prepare(int32_t device, ffi::RunId run, Extension collectives, Attributes attributes) {
  return guarded([&] {
    const DeviceScope scope(device);
    note_failure(run, [&] { load_kernels_once(device); });
    NcclExchange::prepare();
    ReplicaGroups(attributes.replica_groups, attributes.group_size).request(collectives);
  });
}

ffi::Error initialize(cudaStream_t stream, int32_t device, ffi::RunId run, Extension collectives,
                      Attributes attributes) {
  return guarded([&] {
    const DeviceScope scope(device);
    if (attributes.slot_bytes < 1 || attributes.slot_bytes % 256 != 0) {
      throw InvalidCall("slot_bytes=" + std::to_string(attributes.slot_bytes) +
                        ": must be a positive multiple of 256");
    }
    void* communicator =
        ReplicaGroups(attributes.replica_groups, attributes.group_size).communicator(collectives);
    NcclExchange exchange(communicator, stream);
    const WorkspaceKey key{communicator, static_cast<size_t>(attributes.slot_bytes)};
    note_failure(run, [&] {
      const Workspace* known = find_workspace(key);
      if (known == nullptr) return make_workspace(key, exchange);
      // XLA may have given the address of a communicator that it had destroyed to a new one.
      if (known->window.rank != exchange.rank() ||
          known->window.num_ranks != exchange.num_ranks() || known->device != device) {
        throw std::runtime_error("the communicators of XLA have changed; start the process anew");
      }
    });
  });
}

std::atomic<int64_t> executions{0};

// `decode` makes the Call; it is called on the device of the handler. While XLA captures a CUDA graph
// this enqueues nothing but adds the launch to the graph, so that it must not wait or allocate, and
// whatever differs between runs must be read from device memory by the kernel (the deadline stays as it
// was when the graph was captured).
template <class Decode>
ffi::Error execute(cudaStream_t stream, int32_t device, ffi::RunId run, Extension collectives,
                   const Attributes& attributes, Decode decode) {
  executions++;
  return guarded([&] {
    throw_noted_failure(run);
    const std::string failure = last_failure();
    if (!failure.empty()) throw std::runtime_error(failure);
    const DeviceScope scope(device);
    const Call call = decode();
    void* communicator =
        ReplicaGroups(attributes.replica_groups, attributes.group_size).communicator(collectives);
    const Workspace* workspace =
        find_workspace({communicator, static_cast<size_t>(attributes.slot_bytes)});
    if (workspace == nullptr) {
      throw std::runtime_error(
          "there is no workspace. ENTWINE_JAX_DISABLE=1 runs everything as plain lax.");
    }
    if (workspace->window.num_ranks != attributes.group_size) {
      throw InvalidCall("group_size: must be the number of ranks of the communicator");
    }
    PeerWindow window = workspace->window;
    window.deadline_ns = deadline_ns();
    launch_call(call, attributes.schedule, window, workspace->num_sms, stream);
  });
}

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error allreduce(cudaStream_t stream, int32_t device, ffi::RunId run, Extension collectives,
                     ffi::AnyBuffer x, ffi::AnyBuffer w, Result y, Attributes attributes) {
  return execute(stream, device, run, collectives, attributes,
                 [&] { return decode_allreduce(attributes, x, w, *y); });
}

ffi::Error reducescatter(cudaStream_t stream, int32_t device, ffi::RunId run, Extension collectives,
                         ffi::AnyBuffer x, ffi::AnyBuffer w, Result y, Attributes attributes) {
  return execute(stream, device, run, collectives, attributes,
                 [&] { return decode_reducescatter(attributes, x, w, *y); });
}

ffi::Error allgather(cudaStream_t stream, int32_t device, ffi::RunId run, Extension collectives,
                     ffi::AnyBuffer x, ffi::AnyBuffer w, Result y, Result gathered,
                     Attributes attributes) {
  return execute(stream, device, run, collectives, attributes,
                 [&] { return decode_allgather(attributes, x, w, *y, *gathered); });
}

// Stream, device, run and communicator, then x and w: what every Execute takes.
auto bind_operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::Extension<Collectives>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>();
}

template <bool kInGraphs, class Binding, class Function>
auto* make_handler(Binding&& binding, Function function) {
  if constexpr (kInGraphs) {
    return binding.To(function, {ffi::Traits::kCmdBufferCompatible}).release();
  } else {
    return binding.To(function).release();
  }
}

template <auto kFunction, bool kInGraphs>
XLA_FFI_Error* execute_reduction(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      make_handler<kInGraphs>(bind_operands().Ret<ffi::AnyBuffer>().Attrs<Attributes>(), kFunction);
  return handler->Call(frame);
}

template <bool kInGraphs>
XLA_FFI_Error* execute_allgather(XLA_FFI_CallFrame* frame) {
  static auto* handler = make_handler<kInGraphs>(
      bind_operands().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attrs<Attributes>(), allgather);
  return handler->Call(frame);
}

}  // namespace

const std::array<Target, 6> kTargets{{
    {"entwine_jax.matmul_allreduce.v4", execute_reduction<allreduce, false>},
    {"entwine_jax.matmul_reducescatter.v4", execute_reduction<reducescatter, false>},
    {"entwine_jax.allgather_matmul.v4", execute_allgather<false>},
    {"entwine_jax.matmul_allreduce.in_graphs.v4", execute_reduction<allreduce, true>},
    {"entwine_jax.matmul_reducescatter.in_graphs.v4", execute_reduction<reducescatter, true>},
    {"entwine_jax.allgather_matmul.in_graphs.v4", execute_allgather<true>},
}};

XLA_FFI_Error* prepare_call(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindPrepare()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::Extension<Collectives>>()
                             .Attrs<Attributes>()
                             .To(prepare)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* initialize_call(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInitialize()
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::RunId>()
                             .Ctx<ffi::Extension<Collectives>>()
                             .Attrs<Attributes>()
                             .To(initialize)
                             .release();
  return handler->Call(frame);
}

int64_t num_executions() { return executions.load(); }

}  // namespace entwine
