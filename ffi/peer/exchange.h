// How the ranks of a group tell each other where their memory is. The kernel and the workspace know
// nothing else of how a group came about.
#pragma once

#include <cstddef>

namespace entwine {

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  // Collective and blocking: every rank gives `num_bytes` at `mine` and gets those of all ranks, in
  // rank order, at `all`. What a rank's host had waited for before is done for whoever gets its
  // bytes.
  virtual void all_gather(const void* mine, void* all, size_t num_bytes) = 0;
};

}  // namespace entwine
