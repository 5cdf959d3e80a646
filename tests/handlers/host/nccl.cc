// The three functions of libnccl.so.2 that ffi/handlers/communicator.cc looks up.
#include <chrono>
#include <cstring>

#include "communicator.h"
#include "cuda_runtime_api.h"

extern "C" {

int ncclCommUserRank(void* communicator, int* rank) {
  *rank = static_cast<Communicator*>(communicator)->rank;
  return 0;
}

int ncclCommCount(void* communicator, int* num_ranks) {
  *num_ranks = static_cast<Communicator*>(communicator)->num_ranks;
  return 0;
}

// Behind what its stream has to do. An error, where NCCL would wait forever: a rank did not come.
int ncclAllGather(const void* mine, void* all, size_t num_bytes, int, void* communicator,
                  void* stream) {
  constexpr int kNcclSystemError = 2, kNcclInvalidArgument = 4;
  if (stream == nullptr) return kNcclInvalidArgument;  // XLA has given one
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
  const auto& [clique, rank, num_ranks] = *static_cast<Communicator*>(communicator);
  std::unique_lock lock(clique->mutex);
  const auto meet = [&] {
    const int meeting = clique->num_meetings;
    if (++clique->num_waiting == num_ranks) {
      clique->num_waiting = 0;
      clique->num_meetings++;
      clique->changed.notify_all();
      return true;
    }
    return clique->changed.wait_for(lock, std::chrono::seconds(10),
                                    [&] { return clique->num_meetings != meeting; });
  };
  clique->words.resize(num_ranks * num_bytes);
  std::memcpy(clique->words.data() + rank * num_bytes, mine, num_bytes);
  if (!meet()) return kNcclSystemError;
  std::memcpy(all, clique->words.data(), num_ranks * num_bytes);
  return meet() ? 0 : kNcclSystemError;  // nobody writes before all have read
}
}
