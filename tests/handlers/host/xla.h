// XLA's side of a custom call: the frame of a stage on one device, communicators, and errors.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "communicator.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace xla_side {

using Attribute = std::variant<int64_t, std::vector<int64_t>, std::map<std::string, int64_t>>;

struct Buffer {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> sizes;
  void* data;
};

// A custom call as compiled for one device.
struct CustomCall {
  std::vector<Buffer> operands, results;
  std::map<std::string, Attribute> attributes;  // by name, as XLA sorts them
};

// What is wrong with the extension that gives communicators, or with them.
enum class Collectives { kRight, kMissing, kNewMajorVersion, kRefusing, kOtherSize };

class Runtime {
 public:
  // Runs one stage of the call on a device; "ok", or the code and the words of the error.
  std::string run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, CustomCall& call,
                  int device);
  // Whether XLA may capture the handler in a CUDA graph.
  bool may_be_captured(XLA_FFI_Handler* handler);

  Collectives collectives = Collectives::kRight;
  // What all devices of a run have in common.
  std::atomic<int64_t> run_id = 0;
  // Gives the communicators of every clique to other ranks, as when XLA has made new ones at old
  // addresses.
  void shuffle_communicators();

  XLA_FFI_Error* request(int device, const XLA_FFI_Communicator_Request_Args& args);
  XLA_FFI_Error* communicator(int device, XLA_FFI_Communicator_Get_Args& args);

 private:
  struct Member {
    std::deque<Clique> cliques{1};
    std::deque<Communicator> of_rank;
  };
  std::mutex mutex_;
  std::map<std::vector<int64_t>, Member> cliques_;
};

int num_errors();  // that nobody has destroyed

}  // namespace xla_side
