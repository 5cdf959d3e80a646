#include "cuda_bindings.h"

#include <cuda_runtime_api.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "driver/virtual_ranks.h"
#include "handlers/handlers.h"
#include "launch/device_scope.h"
#include "launch/launch.h"
#include "peer/workspace.h"

namespace nb = nanobind;

namespace entwine {
namespace {

constexpr double kDriverDeadlineSeconds = 10.0;

nb::capsule handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(function));
}

nb::dict registrations() {
  nb::dict targets;
  for (const Target& target : kTargets) {
    nb::dict stages;
    stages["prepare"] = handler(prepare_call);
    stages["initialize"] = handler(initialize_call);
    stages["execute"] = handler(target.execute);
    targets[target.name] = stages;
  }
  return targets;
}

int driver_version() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "asking for the driver");
  return version;
}

int num_devices() {
  int number = 0;
  check_cuda(cudaGetDeviceCount(&number), "counting the GPUs");
  return number;
}

// Whether a GPU can load, store and count in a peer's memory. Over PCIe it may not count.
bool reaches(int ordinal, int peer) {
  for (cudaDeviceP2PAttr attribute :
       {cudaDevP2PAttrAccessSupported, cudaDevP2PAttrNativeAtomicSupported}) {
    int supported = 0;
    check_cuda(cudaDeviceGetP2PAttribute(&supported, attribute, ordinal, peer),
               "asking for peer access");
    if (supported == 0) return false;
  }
  return true;
}

nb::list probe_devices(const std::vector<int>& ordinals) {
  nb::list devices;
  for (int ordinal : ordinals) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, ordinal), "asking for a GPU's properties");
    nb::list peer_access;
    for (int peer : ordinals) {
      peer_access.append(peer == ordinal || reaches(ordinal, peer));
    }
    nb::dict device;
    device["ordinal"] = ordinal;
    device["name"] = std::string(properties.name);
    device["compute_capability"] = nb::make_tuple(properties.major, properties.minor);
    size_t free_bytes = 0, total_bytes = 0;
    const DeviceScope scope(ordinal);
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for a GPU's free memory");
    device["free_bytes"] = free_bytes;
    device["peer_access"] = peer_access;
    devices.append(device);
  }
  return devices;
}

nb::list reports() {
  nb::list list;
  for (const WorkspaceInfo& info : workspace_report()) {
    nb::dict entry;
    entry["device"] = info.device;
    entry["rank"] = info.rank;
    entry["num_ranks"] = info.num_ranks;
    entry["slot_bytes"] = info.slot_bytes;
    entry["control_bytes"] = info.control_bytes;
    list.append(entry);
  }
  return list;
}

Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw InvalidCall("dtype=" + name + ": must be bfloat16 or float16");
}

Op op_of(const std::string& name) {
  if (name == "matmul_allreduce") return Op::kAllReduce;
  if (name == "matmul_reducescatter") return Op::kReduceScatter;
  if (name == "allgather_matmul") return Op::kAllGather;
  throw InvalidCall("op=" + name + ": must be one of the three ops");
}

// The fields of a Schedule, among others or not.
Schedule schedule_of(nb::dict fields) {
  const auto field = [&](const char* name) { return nb::cast<int64_t>(fields[name]); };
  return {field("tile_m"),         field("tile_n"),          field("num_comm_ctas"),
          field("num_senders"),    field("num_spare_warps"), field("raster"),
          field("push_spread"),    field("narrow_tail"),     field("split_k"),
          field("rows_per_launch")};
}

// A problem is a dict of op, m, n, k, num_batches, w_transposed and the fields of a Schedule.
VirtualProblem problem_of(nb::dict problem) {
  const auto field = [&](const char* name) { return nb::cast<int64_t>(problem[name]); };
  return {op_of(nb::cast<std::string>(problem["op"])),
          field("m"),
          field("n"),
          field("k"),
          field("num_batches"),
          field("w_transposed") != 0,
          schedule_of(problem)};
}

nb::dict virtual_ranks(nb::list problems, int num_ranks, std::vector<int> devices,
                       const std::string& dtype, int num_ctas, int resident_ctas, int held_devices,
                       int num_calls, int num_timed_calls, int late_ms, int missing_rank,
                       uint64_t seed, double deadline_seconds, int num_traced_calls) {
  VirtualRanksRequest request{
      .problems = {},
      .num_ranks = num_ranks,
      .devices = std::move(devices),
      .dtype = dtype_of(dtype),
      .num_ctas = num_ctas,
      .resident_ctas = resident_ctas,
      .held_devices = held_devices,
      .num_calls = num_calls,
      .num_timed_calls = num_timed_calls,
      .late_ms = late_ms,
      .missing_rank = missing_rank,
      .seed = seed,
      .deadline_seconds = deadline_seconds,
      .num_traced_calls = num_traced_calls,
  };
  for (nb::handle problem : problems) {
    request.problems.push_back(problem_of(nb::cast<nb::dict>(problem)));
  }
  VirtualRanksResult result;
  {
    const nb::gil_scoped_release release;
    result = run_virtual_ranks(request);
  }
  nb::dict out;
  out["wrong_elements"] = result.wrong_elements;
  out["wrong_partials"] = result.wrong_partials;
  out["microseconds"] = result.microseconds;
  nb::list events;
  for (const std::vector<TraceEvent>& call : result.events) {
    events.append(nb::bytes(call.data(), call.size() * sizeof(TraceEvent)));
  }
  out["events"] = events;
  return out;
}

void make_timed_ranks(TimedRanks* self, nb::dict problem, int num_ranks, std::vector<int> devices,
                      const std::string& dtype, int num_ctas) {
  VirtualRanksRequest request{};
  request.problems = {problem_of(problem)};
  request.num_ranks = num_ranks;
  request.devices = std::move(devices);
  request.dtype = dtype_of(dtype);
  request.num_ctas = num_ctas;
  request.missing_rank = -1;
  request.deadline_seconds = kDriverDeadlineSeconds;
  const nb::gil_scoped_release release;
  new (self) TimedRanks(std::move(request));
}

double timed_microseconds(TimedRanks& ranks, nb::dict schedule, int num_calls) {
  const Schedule fields = schedule_of(schedule);
  const nb::gil_scoped_release release;
  return ranks.microseconds(fields, num_calls);
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("registrations", registrations,
        nb::sig("def registrations() -> dict[str, dict[str, object]]"),
        "Custom call targets: name -> stage -> handler.");
  m.def("num_executions", num_executions,
        "How often XLA has called a handler to execute a call; not where it replays a CUDA graph.");
  m.def("num_devices", num_devices, "GPUs that CUDA sees.");
  m.def("driver_version", driver_version, "The CUDA version of the driver, e.g. 13000; 0 if none.");
  m.def(
      "probe_devices", probe_devices, nb::arg("ordinals"),
      nb::sig("def probe_devices(ordinals: list[int]) -> list[dict[str, object]]"),
      "These GPUs and which of them reach each other. RuntimeError with CUDA's words if it fails.");
  m.def("set_deadline", set_deadline, nb::arg("seconds"),
        "The longest wait inside a kernel, for launches from now on.");
  m.def("workspace_report", reports, nb::sig("def workspace_report() -> list[dict[str, int]]"));
  m.def(
      "run_virtual_ranks", virtual_ranks, nb::arg("problems"), nb::arg("num_ranks"),
      nb::arg("devices"), nb::arg("dtype"), nb::arg("num_ctas"), nb::arg("resident_ctas") = 0,
      nb::arg("held_devices") = 0, nb::arg("num_calls") = 6, nb::arg("num_timed_calls") = 0,
      nb::arg("late_ms") = 0, nb::arg("missing_rank") = -1, nb::arg("seed") = 0,
      nb::arg("deadline_seconds") = kDriverDeadlineSeconds, nb::arg("num_traced_calls") = 0,
      nb::sig(
          "def run_virtual_ranks(problems: list[dict[str, object]], num_ranks: int, "
          "devices: list[int], dtype: str, num_ctas: int, resident_ctas: int = 0, "
          "held_devices: int = 0, num_calls: int = 6, num_timed_calls: int = 0, late_ms: int = 0, "
          "missing_rank: int = -1, seed: int = 0, deadline_seconds: float = 10.0, "
          "num_traced_calls: int = 0) -> dict[str, typing.Any]"),
      "Runs the kernel without XLA, several ranks on a GPU if need be (tests and tuning).");
  nb::class_<TimedRanks>(m, "TimedRanks", "Times calls of one problem, on operands that stay.")
      .def("__init__", make_timed_ranks, nb::arg("problem"), nb::arg("num_ranks"),
           nb::arg("devices"), nb::arg("dtype"), nb::arg("num_ctas"),
           nb::sig("def __init__(self, problem: dict[str, object], num_ranks: int, "
                   "devices: list[int], dtype: str, num_ctas: int) -> None"))
      .def("microseconds", timed_microseconds, nb::arg("schedule"), nb::arg("num_calls"),
           nb::sig("def microseconds(self, schedule: dict[str, int], num_calls: int) -> float"),
           "Time of a call with this schedule, slowest rank.");
}

}  // namespace entwine
