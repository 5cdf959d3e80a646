#include "launch/instance.cuh"

namespace entwine {
extern const Instance kBfloat16Tile128 =
    make_instance<KernelConfig<cutlass::bfloat16_t, 128, /*num_stages=*/5>>(Dtype::kBfloat16);
}  // namespace entwine
