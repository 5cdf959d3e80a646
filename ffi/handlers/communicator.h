// XLA's communicator for the devices of a call: the only public way to a rank, and to the group's
// clique lock, which gives all runs the same order on all devices.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "peer/exchange.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

namespace entwine {

// Decodes the collectives extension of any minor version since the first: newer ones only append.
struct Collectives {
  using CExtension = XLA_FFI_Collectives_Extension;
  struct Type {
    const XLA_FFI_Api* api;
    const CExtension* extension;

    // Throws XLA's words, and takes the error.
    void check(XLA_FFI_Error* error, const std::string& what) const;
  };
  static constexpr auto kName = "CollectivesExtension";
  static constexpr int32_t kExtensionType = XLA_FFI_Extension_Collectives;
  static constexpr int32_t kMajorVersion = XLA_FFI_Extension_Collectives_MajorVersion;
  static constexpr int32_t kMinorVersion = XLA_FFI_Extension_Collectives_MinorVersion;
  static bool Support(int32_t major_version, int32_t minor_version) {
    return major_version == 0 && minor_version >= 1;
  }
  static Type Create(const XLA_FFI_Api* api, const CExtension* extension) {
    return {api, extension};
  }
};

// All groups of the call as logical device ids, as JAX's own collectives give them.
class ReplicaGroups {
 public:
  // `ids`: the groups one behind the other, each of `group_size`. Throws if they do not divide.
  ReplicaGroups(xla::ffi::Span<const int64_t> ids, int64_t group_size);

  // In Prepare. Throws what XLA answers.
  void request(const Collectives::Type& collectives) const;
  // In Initialize and Execute. The ncclComm_t of this device's rank.
  void* communicator(const Collectives::Type& collectives) const;

 private:
  std::vector<XLA_FFI_ReplicaGroup> groups_;
};

// Exchange over an ncclComm_t. NCCL is taken from the library that XLA has already loaded.
class NcclExchange : public Exchange {
 public:
  NcclExchange(void* communicator, cudaStream_t stream);

  // Makes sure that there is memory for exchanges on the current device. Before any exchange: a rank that
  // failed to get it later would leave the others waiting for it.
  static void prepare();

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  void all_gather(const void* mine, void* all, size_t num_bytes) override;

 private:
  void* communicator_;
  cudaStream_t stream_;
  int rank_ = 0, num_ranks_ = 0;
};

}  // namespace entwine
