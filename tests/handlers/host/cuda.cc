// The CUDA runtime of the machine. Streams are done at once.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "cuda_runtime_api.h"
#include "machine.h"

namespace {

struct Allocation {
  size_t num_bytes;
  int device;
};

std::mutex mutex;
std::map<const char*, Allocation> allocations;
std::set<std::pair<int, int>> peers;
std::pair<std::string, int> failing{"nothing", -1};
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool fails(const char* what) { return failing == std::pair{std::string(what), current}; }

cudaError_t allocate(const char* what, void** pointer, size_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (fails(what)) return answer(cudaErrorMemoryAllocation);
  *pointer = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  allocations[static_cast<char*>(*pointer)] = {num_bytes, current};
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  const std::lock_guard lock(mutex);
  if (pointer != nullptr && allocations.erase(static_cast<char*>(pointer)) == 0) std::abort();
  std::free(pointer);
  return cudaSuccess;
}

}  // namespace

namespace machine {

void fail(const std::string& what, int device) {
  const std::lock_guard lock(mutex);
  failing = {what, device};
}

int owner(const void* address) {
  const std::lock_guard lock(mutex);
  const auto* byte = static_cast<const char*>(address);
  auto found = allocations.upper_bound(byte);
  if (found == allocations.begin()) return -1;
  --found;
  return byte < found->first + found->second.num_bytes ? found->second.device : -1;
}

int num_allocations() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(allocations.size());
}

}  // namespace machine

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "peer access is not supported";
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = machine::kNumSms;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const std::lock_guard lock(mutex);
  if (fails("peer_access")) return answer(cudaErrorPeerAccessUnsupported);
  return answer(peers.insert({current, peer}).second ? cudaSuccess
                                                     : cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaMalloc(void** pointer, size_t num_bytes) {
  return allocate("malloc", pointer, num_bytes);
}

cudaError_t cudaFree(void* pointer) { return release(pointer); }

cudaError_t cudaHostAlloc(void** pointer, size_t num_bytes, unsigned) {
  return allocate("host_alloc", pointer, num_bytes);
}

cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }

cudaError_t cudaMemset(void* pointer, int value, size_t num_bytes) {
  // The beginning of it: nobody reads the rest, which may be gigabytes.
  std::memset(pointer, value, std::min<size_t>(num_bytes, 4096));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, num_bytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for others to meddle
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
