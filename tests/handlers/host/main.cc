// Plays XLA for the handlers of ffi/handlers on a machine of several GPUs: reads commands from standard
// input, a line each, and answers each with lines and an empty one. A rank is a thread.
//
// programs N DEVICES           a custom call in each of so many programs, as yet without anything
// program I                    the lines that follow are of this one; 0 at first
// attribute D NAME V           of the custom call on device D: an int64
// attribute D NAME [ V ... ]   an array of them
// attribute D NAME.FIELD V     a field of a struct
// operand D DTYPE SIZE ...     the next operand, and below the next result; the memory of each begins
// result D DTYPE SIZE ...      with its number, counted from 0 over operands and results
// prepare | initialize | execute TARGET    the stage of all programs on all devices at once: how each
//                              ended, program after program. A run begins with prepare
// one_program                  from now on the programs are the calls of one: a device makes them in turn,
//                              and ends at the first error
// launches                     since the last time
// fail WHAT D                  in machine.h
// reaches D PEER               XLA has enabled it
// collectives right | missing | new_major_version | refusing | other_size
// shuffle                      of xla.h
// process D                    device D is taken for one of another process
// late_peer D PEER             the last kernel on D has waited too long for PEER
// deadline SECONDS
// captured TARGET              whether XLA may capture it in a CUDA graph
// executions                   of handlers, so far
// report                       the workspaces: device, rank, ranks, bytes of slots and of control
// count                        errors not destroyed, allocations not freed
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <latch>
#include <sstream>
#include <thread>

#include "cuda_runtime_api.h"
#include "handlers/handlers.h"
#include "launches.h"
#include "machine.h"
#include "peer/workspace.h"
#include "xla.h"

namespace {

xla_side::Runtime runtime;
std::vector<std::vector<xla_side::CustomCall>> programs;  // by device
size_t chosen = 0;                                        // among them
bool one_program = false;
int other_process = -1;  // the device of it

XLA_FFI_DataType dtype_named(const std::string& name) {
  if (name == "bf16") return XLA_FFI_DataType_BF16;
  return name == "f16" ? XLA_FFI_DataType_F16 : XLA_FFI_DataType_F32;
}

void set_attribute(xla_side::CustomCall& call, const std::string& name, std::istream& words) {
  std::string word;
  words >> word;
  if (word == "[") {
    std::vector<int64_t> values;
    while (words >> word && word != "]") values.push_back(std::stoll(word));
    call.attributes[name] = values;
  } else if (const size_t dot = name.find('.'); dot != std::string::npos) {
    auto& value = call.attributes[name.substr(0, dot)];
    if (value.index() != 2) value = std::map<std::string, int64_t>{};
    std::get<2>(value)[name.substr(dot + 1)] = std::stoll(word);
  } else {
    call.attributes[name] = std::stoll(word);
  }
}

void add_buffer(xla_side::CustomCall& call, int device, bool is_result, std::istream& words) {
  std::string dtype;
  words >> dtype;
  xla_side::Buffer buffer{dtype_named(dtype), {}, nullptr};
  for (int64_t size; words >> size;) buffer.sizes.push_back(size);
  cudaSetDevice(device);
  cudaMalloc(&buffer.data, 256);
  *static_cast<int64_t*>(buffer.data) = call.operands.size() + call.results.size();
  (is_result ? call.results : call.operands).push_back(buffer);
}

// One stage of one call on one device.
std::string run_on(int device, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                   xla_side::CustomCall& call) {
  const int before = 99;  // no rank's: a handler has to choose its device, and to restore this
  cudaSetDevice(before);
  std::string end = runtime.run(handler, stage, call, device);
  int after = -1;
  cudaGetDevice(&after);
  if (after != before) end += " and left another device";
  if (cudaGetLastError() != cudaSuccess) end += " and left an error of CUDA";
  std::replace(end.begin(), end.end(), '\n', ' ');
  return end;
}

void run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
  const size_t num_devices = programs.at(0).size(), num_calls = programs.size();
  std::vector<std::string> ends(num_calls * num_devices);
  std::vector<std::vector<size_t>> in_turn;  // by thread
  for (size_t i = 0; i < ends.size(); i++) {
    if (!one_program || i < num_devices) in_turn.emplace_back();
    in_turn[one_program ? i % num_devices : i].push_back(i);
  }
  std::latch start(static_cast<ptrdiff_t>(in_turn.size()));
  {
    std::vector<std::jthread> threads;
    for (const std::vector<size_t>& turns : in_turn) {
      threads.emplace_back([&] {
        start.arrive_and_wait();
        for (const size_t i : turns) {
          const size_t device = i % num_devices;
          ends[i] =
              run_on(static_cast<int>(device), handler, stage, programs[i / num_devices][device]);
          if (ends[i] != "ok") return;
        }
      });
    }
  }
  for (const std::string& end : ends) std::cout << (end.empty() ? "not made" : end) << '\n';
}

XLA_FFI_Handler* target_named(const std::string& name) {
  for (const entwine::Target& target : entwine::kTargets) {
    if (name == target.name) return target.execute;
  }
  return [](XLA_FFI_CallFrame*) -> XLA_FFI_Error* { std::abort(); };
}

void obey(const std::string& command, std::istream& words) {
  using Kind = xla_side::Collectives;
  static const std::map<std::string, Kind> kinds{{"right", Kind::kRight},
                                                 {"missing", Kind::kMissing},
                                                 {"new_major_version", Kind::kNewMajorVersion},
                                                 {"refusing", Kind::kRefusing},
                                                 {"other_size", Kind::kOtherSize}};
  std::string name;
  int device = 0, peer = 0;
  if (command == "programs") {
    size_t num_programs = 0, num_devices = 0;
    words >> num_programs >> num_devices;
    programs.assign(num_programs, std::vector<xla_side::CustomCall>(num_devices));
    chosen = 0;
  } else if (command == "program") {
    words >> chosen;
  } else if (command == "one_program") {
    one_program = true;
  } else if (command == "attribute") {
    words >> device >> name;
    set_attribute(programs.at(chosen).at(device), name, words);
  } else if (command == "operand" || command == "result") {
    words >> device;
    add_buffer(programs.at(chosen).at(device), device, command == "result", words);
  } else if (command == "prepare") {
    runtime.run_id--;  // XLA's ids do not grow either
    run(entwine::prepare_call, XLA_FFI_ExecutionStage_PREPARE);
  } else if (command == "initialize") {
    run(entwine::initialize_call, XLA_FFI_ExecutionStage_INITIALIZE);
  } else if (command == "execute") {
    words >> name;
    run(target_named(name), XLA_FFI_ExecutionStage_EXECUTE);
  } else if (command == "launches") {
    for (const std::string& line : launches::taken()) std::cout << line << '\n';
  } else if (command == "fail") {
    words >> name >> device;
    machine::fail(name, device);
  } else if (command == "reaches") {
    words >> device >> peer;
    machine::enable_peer_access(device, peer);
  } else if (command == "deadline") {
    double seconds = 0;
    words >> seconds;
    entwine::set_deadline(seconds);
  } else if (command == "captured") {
    words >> name;
    std::cout << runtime.may_be_captured(target_named(name)) << '\n';
  } else if (command == "executions") {
    std::cout << entwine::num_executions() << '\n';
  } else if (command == "collectives") {
    words >> name;
    runtime.collectives = kinds.at(name);
  } else if (command == "shuffle") {
    runtime.shuffle_communicators();
  } else if (command == "process") {
    words >> other_process;
  } else if (command == "late_peer") {
    words >> device >> peer;
    launches::fail_last(device, peer);
  } else if (command == "report") {
    for (const entwine::WorkspaceInfo& info : entwine::workspace_report()) {
      std::cout << info.device << ' ' << info.rank << ' ' << info.num_ranks << ' '
                << info.slot_bytes << ' ' << info.control_bytes << '\n';
    }
  } else if (command == "count") {
    std::cout << xla_side::num_errors() << ' ' << machine::num_allocations() << '\n';
  } else {
    throw std::invalid_argument(command);
  }
}

}  // namespace

// ffi/peer/workspace.cc is compiled to ask this for its process.
pid_t process_of_rank() noexcept {
  int device = 0;
  cudaGetDevice(&device);
  return device == other_process ? 2 : 1;
}

int main() {
  for (std::string line, command; std::getline(std::cin, line);) {
    std::istringstream words(line);
    words >> command;
    obey(command, words);
    std::cout << std::endl;
  }
}
