// Waits that passed their deadline: what the kernels left in pinned memory, in words.
#pragma once

#include <string>

#include "peer/control_block.h"

namespace entwine {

// Prints what last_failure() says to standard error as soon as it says something: XLA's own error
// only tells that a kernel failed. Starts its thread on the first call.
void watch_for_failures();

// Empty while the record says that nothing failed.
std::string describe(const WaitFailure& failure);

}  // namespace entwine
