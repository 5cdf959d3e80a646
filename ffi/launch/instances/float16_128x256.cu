#include "launch/instance.cuh"

namespace entwine {
extern const Instance kFloat16Tile256 =
    make_instance<KernelConfig<cutlass::half_t, 256, /*num_stages=*/3>>(Dtype::kFloat16);
}  // namespace entwine
