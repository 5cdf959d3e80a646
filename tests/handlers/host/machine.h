// A machine of several GPUs, played by memory of the host: whose memory is whose, and what fails.
#pragma once

#include <string>

#include "cuda_runtime_api.h"

namespace machine {

constexpr int kNumSms = 132;

// From now on `what` fails on `device`: malloc, host_alloc, attribute, peer_access, or load (of the kernels).
// "nothing": nothing.
void fail(const std::string& what, int device);
bool fails(const std::string& what, int device);
// As XLA may have done.
void enable_peer_access(int device, int peer);
bool reaches(int device, int peer);
// The stream that XLA gives for a device.
cudaStream_t stream_of(int device);
// The device whose memory this address lies in; -1: none.
int owner(const void* address);
// Allocations that have not been freed.
int num_allocations();

}  // namespace machine
