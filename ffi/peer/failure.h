// Waits that passed their deadline: what the kernels left in pinned memory, in words.
#pragma once

#include <string>

#include "peer/control_block.h"

namespace entwine {

// Empty while the record says that nothing failed.
std::string describe(const WaitFailure& failure);

}  // namespace entwine
