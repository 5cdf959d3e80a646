#include "launch/instance.cuh"

namespace entwine {
extern const Instance kBfloat16Tile256 =
    make_instance<KernelConfig<cutlass::bfloat16_t, 256, /*num_stages=*/3>>(Dtype::kBfloat16);
}  // namespace entwine
