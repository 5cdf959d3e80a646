#include "handlers/communicator.h"

#include <dlfcn.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "launch/launch.h"

namespace entwine {
namespace {

// A clique of our own: XLA's collectives (id 0) may ask for the same devices with other lists of groups,
// and XLA takes that for an error.
constexpr int64_t kCommunicationId = 7;

void check_xla(const XLA_FFI_Error* error, const char* what) {
  // The extension has no call to read the message of its errors.
  if (error != nullptr) throw std::runtime_error(std::string("XLA refused to ") + what);
}

template <class Function>
Function nccl_function(const char* name) {
  static void* const library = [] {
    void* loaded = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
    return loaded != nullptr ? loaded : dlopen("libnccl.so.2", RTLD_LAZY);
  }();
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string(name) + " was not found in libnccl.so.2");
  }
  return reinterpret_cast<Function>(symbol);
}

void check_nccl(int result, const char* what) {
  if (result != 0) {
    throw std::runtime_error(std::string(what) + " failed: NCCL error " + std::to_string(result));
  }
}

}  // namespace

ReplicaGroups::ReplicaGroups(xla::ffi::Span<const int64_t> ids, int64_t group_size) {
  if (group_size < 1 || ids.size() == 0 || ids.size() % group_size != 0) {
    throw InvalidCall("group_size=" + std::to_string(group_size) + ": must divide the " +
                      std::to_string(ids.size()) + " ids of replica_groups");
  }
  for (size_t first = 0; first < ids.size(); first += group_size) {
    groups_.push_back({ids.begin() + first, static_cast<size_t>(group_size)});
  }
}

void ReplicaGroups::request(const XLA_FFI_Collectives_Extension* extension) const {
  XLA_FFI_Communicator_Request_Args args{};
  args.struct_size = XLA_FFI_Communicator_Request_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups_.data();
  args.num_groups = groups_.size();
  args.communication_id = kCommunicationId;
  check_xla(extension->request_communicator(extension, &args), "request the communicator");
}

void* ReplicaGroups::communicator(const XLA_FFI_Collectives_Extension* extension) const {
  XLA_FFI_Communicator_Get_Args args{};
  args.struct_size = XLA_FFI_Communicator_Get_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups_.data();
  args.num_groups = groups_.size();
  args.communication_id = kCommunicationId;
  check_xla(extension->get_communicator(extension, &args), "give the communicator");
  return args.communicator;
}

NcclExchange::NcclExchange(void* communicator, cudaStream_t stream)
    : communicator_(communicator), stream_(stream) {
  using Ask = int (*)(void*, int*);
  check_nccl(nccl_function<Ask>("ncclCommUserRank")(communicator, &rank_), "ncclCommUserRank");
  check_nccl(nccl_function<Ask>("ncclCommCount")(communicator, &num_ranks_), "ncclCommCount");
}

void NcclExchange::all_gather(const void* mine, void* all, size_t num_bytes) {
  using AllGather = int (*)(const void*, void*, size_t, int, void*, cudaStream_t);
  constexpr int kNcclInt8 = 0;
  void* allocated = nullptr;
  check_cuda(cudaMalloc(&allocated, (num_ranks_ + 1) * num_bytes), "allocating for the exchange");
  const std::unique_ptr<void, cudaError_t (*)(void*)> owner(allocated, cudaFree);
  char* buffer = static_cast<char*>(allocated);  // mine, then all
  check_cuda(cudaMemcpyAsync(buffer, mine, num_bytes, cudaMemcpyHostToDevice, stream_),
             "copying for the exchange");
  check_nccl(nccl_function<AllGather>("ncclAllGather")(buffer, buffer + num_bytes, num_bytes,
                                                       kNcclInt8, communicator_, stream_),
             "ncclAllGather");
  check_cuda(cudaMemcpyAsync(all, buffer + num_bytes, num_ranks_ * num_bytes,
                             cudaMemcpyDeviceToHost, stream_),
             "copying for the exchange");
  check_cuda(cudaStreamSynchronize(stream_), "exchanging addresses with the other ranks");
}

}  // namespace entwine
