// Waits that passed their deadline: what the kernels left in pinned memory, in words.
#pragma once

#include <string>
#include <vector>

#include "peer/control_block.h"

namespace entwine {

// Prints what last_failure() says to standard error as soon as it says something: XLA's own error
// only tells that a kernel failed. Starts its thread on the first call.
void watch_for_failures();

bool has_failed(const WaitFailure& failure);

// `silent`: the ranks of the group whose kernels have recorded no failed wait, so that they may be those
// that did not come. Empty while the record says that nothing failed.
std::string describe(const WaitFailure& failure, const std::vector<int>& silent);

}  // namespace entwine
