// A machine of several GPUs, played by memory of the host: whose memory is whose, and what fails.
#pragma once

#include <string>

namespace machine {

constexpr int kNumSms = 132;

// From now on `what` fails on `device`: malloc, host_alloc or peer_access. "nothing": nothing fails.
void fail(const std::string& what, int device);
// The device whose memory this address lies in; -1: none.
int owner(const void* address);
// Allocations that have not been freed.
int num_allocations();

}  // namespace machine
