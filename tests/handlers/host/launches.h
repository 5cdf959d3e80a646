// What the stand-ins for the kernels were launched with.
#pragma once

#include <mutex>
#include <string>
#include <vector>

namespace launches {

// A line for every launch since the last call of this, as words of the form name=value.
std::vector<std::string> taken();
// The last kernel on `device` ends as one whose wait for `peer` has passed its deadline.
void fail_last(int device, int peer);

}  // namespace launches
