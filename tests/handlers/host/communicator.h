// What XLA hands out as a communicator, and NCCL takes.
#pragma once

#include <condition_variable>
#include <mutex>
#include <vector>

// The ranks of a group meet here.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  int num_waiting = 0, num_meetings = 0;
  std::vector<char> words;
};

struct Communicator {
  Clique* clique;
  int rank, num_ranks;
};
