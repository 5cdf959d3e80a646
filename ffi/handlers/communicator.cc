#include "handlers/communicator.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "launch/launch.h"
#include "peer/control_block.h"

namespace entwine {
namespace {

// A clique of our own: XLA's collectives (id 0) may ask for the same devices with other lists of
// groups, and XLA takes that for an error.
constexpr int64_t kCommunicationId = 7;

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

constexpr size_t kMaxExchangeBytes = 64;

// Buffers that no exchange is using, by device. Never destroyed: threads of XLA may outlive statics.
struct SpareBuffers {
  std::mutex mutex;
  std::map<int, std::vector<char*>> of_device;
};

SpareBuffers& spare_buffers() {
  static auto* instance = new SpareBuffers;
  return *instance;
}

// Memory of the current device for one exchange, since several programs may begin on a device at once.
// Allocated for many at a time, and kept: later there might be none, and an allocation beside running
// kernels might wait for them.
class ExchangeBuffer {
 public:
  ExchangeBuffer() {
    check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    {
      const std::lock_guard lock(spare_buffers().mutex);
      std::vector<char*>& spare = spare_buffers().of_device[device_];
      if (!spare.empty()) {
        mine_ = spare.back();
        spare.pop_back();
        return;
      }
    }
    constexpr int kAtATime = 64;
    constexpr size_t kBytes = (kMaxRanks + 1) * kMaxExchangeBytes;
    void* allocated = nullptr;
    check_cuda(cudaMalloc(&allocated, kAtATime * kBytes),
               "allocating for the exchange of addresses");
    mine_ = static_cast<char*>(allocated);
    const std::lock_guard lock(spare_buffers().mutex);
    for (int i = 1; i < kAtATime; i++) {
      spare_buffers().of_device[device_].push_back(mine_ + i * kBytes);
    }
  }
  ~ExchangeBuffer() {
    const std::lock_guard lock(spare_buffers().mutex);
    spare_buffers().of_device[device_].push_back(mine_);
  }
  ExchangeBuffer(const ExchangeBuffer&) = delete;
  ExchangeBuffer& operator=(const ExchangeBuffer&) = delete;

  char* mine() const { return mine_; }
  char* all() const { return mine_ + kMaxExchangeBytes; }

 private:
  int device_ = 0;
  char* mine_ = nullptr;
};

}  // namespace

void Collectives::Type::check(XLA_FFI_Error* error, const std::string& what) const {
  if (error == nullptr) return;
  const std::string message = xla::ffi::internal::GetErrorMessage(api, error);
  xla::ffi::internal::DestroyError(api, error);
  throw std::runtime_error("XLA refused to " + what + ": " + message);
}

ReplicaGroups::ReplicaGroups(xla::ffi::Span<const int64_t> ids, int64_t group_size) {
  if (group_size < 1 || ids.size() == 0 || ids.size() % group_size != 0) {
    throw InvalidCall("group_size=" + std::to_string(group_size) + ": must divide the " +
                      std::to_string(ids.size()) + " ids of replica_groups");
  }
  for (size_t first = 0; first < ids.size(); first += group_size) {
    groups_.push_back({ids.begin() + first, static_cast<size_t>(group_size)});
  }
}

void ReplicaGroups::request(const Collectives::Type& collectives) const {
  XLA_FFI_Communicator_Request_Args args{};
  args.struct_size = XLA_FFI_Communicator_Request_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups_.data();
  args.num_groups = groups_.size();
  args.communication_id = kCommunicationId;
  const auto* extension = collectives.extension;
  collectives.check(extension->request_communicator(extension, &args), "take the request");
}

void* ReplicaGroups::communicator(const Collectives::Type& collectives) const {
  XLA_FFI_Communicator_Get_Args args{};
  args.struct_size = XLA_FFI_Communicator_Get_Args_STRUCT_SIZE;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups_.data();
  args.num_groups = groups_.size();
  args.communication_id = kCommunicationId;
  const auto* extension = collectives.extension;
  collectives.check(extension->get_communicator(extension, &args), "give the communicator");
  return args.communicator;
}

NcclExchange::NcclExchange(void* communicator, cudaStream_t stream)
    : communicator_(communicator), stream_(stream) {
  using Ask = int (*)(void*, int*);
  check_nccl(nccl_function<Ask>("ncclCommUserRank")(communicator, &rank_), "ncclCommUserRank");
  check_nccl(nccl_function<Ask>("ncclCommCount")(communicator, &num_ranks_), "ncclCommCount");
}

void NcclExchange::prepare() { const ExchangeBuffer kept; }

void NcclExchange::all_gather(const void* mine, void* all, size_t num_bytes) {
  using AllGather = int (*)(const void*, void*, size_t, int, void*, cudaStream_t);
  constexpr int kNcclInt8 = 0;
  if (num_bytes > kMaxExchangeBytes || num_ranks_ > kMaxRanks) {
    throw std::runtime_error("more bytes or ranks than an exchange can take");
  }
  const ExchangeBuffer buffer;
  check_cuda(cudaMemcpyAsync(buffer.mine(), mine, num_bytes, cudaMemcpyHostToDevice, stream_),
             "copying for the exchange");
  check_nccl(nccl_function<AllGather>("ncclAllGather")(buffer.mine(), buffer.all(), num_bytes,
                                                       kNcclInt8, communicator_, stream_),
             "ncclAllGather");
  check_cuda(
      cudaMemcpyAsync(all, buffer.all(), num_ranks_ * num_bytes, cudaMemcpyDeviceToHost, stream_),
      "copying for the exchange");
  check_cuda(cudaStreamSynchronize(stream_), "exchanging addresses with the other ranks");
}

}  // namespace entwine
