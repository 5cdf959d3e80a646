// Prints what a failed wait of each kind is called. Usage: words
#include <cstdio>

#include "peer/failure.h"
#include "peer/workspace.h"

namespace entwine {

std::string last_failure() { return ""; }

}  // namespace entwine

int main() {
  using namespace entwine;
  for (uint32_t kind = kWaitNone; kind <= kWaitRowsReady; kind++) {
    const CallName call{Op(kind % 3), Dtype(kind % 2), 512, 1024, 256};
    const std::vector<int> silent(kind % 3, 1);
    std::puts(describe({kind, 0, 1, 7, 3, 2, call}, silent).c_str());
  }
}
