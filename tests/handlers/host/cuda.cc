// The CUDA runtime of the machine. Copies and fills are done when somebody waits for their stream, and
// memory holds garbage at first.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"
#include "machine.h"

struct Stream {
  std::mutex mutex;
  std::vector<std::function<void()>> work;
};

namespace {

constexpr int kMaxDevices = 8;
// Nobody reads more of the slots, which may be gigabytes.
constexpr size_t kMostBytesFilled = 1 << 16;

struct Allocation {
  size_t num_bytes;
  int device;
};

std::mutex mutex;
std::map<const char*, Allocation> allocations;
std::set<std::pair<int, int>> peers;
std::pair<std::string, int> failing{"nothing", -1};
Stream streams[kMaxDevices], default_streams[kMaxDevices];
thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// With the mutex held.
bool fails_here(const char* what) { return failing == std::pair{std::string(what), current}; }

Stream& stream_at(cudaStream_t stream) {
  return stream == nullptr ? default_streams[current] : *stream;
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard lock(stream_at(stream).mutex);
  stream_at(stream).work.push_back(std::move(work));
}

cudaError_t allocate(const char* what, void** pointer, size_t num_bytes) {
  const std::lock_guard lock(mutex);
  if (fails_here(what)) return answer(cudaErrorMemoryAllocation);
  *pointer = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  std::memset(*pointer, 0x5a, std::min(num_bytes, kMostBytesFilled));
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

bool fails(const std::string& what, int device) {
  const std::lock_guard lock(mutex);
  return failing == std::pair{what, device};
}

void enable_peer_access(int device, int peer) {
  const std::lock_guard lock(mutex);
  peers.insert({device, peer});
}

bool reaches(int device, int peer) {
  const std::lock_guard lock(mutex);
  return device == peer || peers.contains({device, peer});
}

cudaStream_t stream_of(int device) { return &streams[device]; }

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
  const std::lock_guard lock(mutex);
  if (fails_here("attribute")) return answer(cudaErrorMemoryAllocation);
  *value = machine::kNumSms;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const std::lock_guard lock(mutex);
  if (peer == current) return answer(cudaErrorInvalidDevice);
  if (fails_here("peer_access")) return answer(cudaErrorPeerAccessUnsupported);
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
  enqueue(nullptr, [=] { std::memset(pointer, value, std::min(num_bytes, kMostBytesFilled)); });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  enqueue(stream, [=] { std::memcpy(to, from, num_bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  {
    const std::lock_guard lock(stream_at(stream).mutex);
    for (const auto& work : stream_at(stream).work) work();
    stream_at(stream).work.clear();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long enough for others to meddle
  return cudaSuccess;
}
