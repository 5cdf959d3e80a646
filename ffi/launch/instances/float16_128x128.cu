#include "launch/instance.cuh"

namespace entwine {
extern const Instance kFloat16Tile128 =
    make_instance<KernelConfig<cutlass::half_t, 128, /*num_stages=*/5>>(Dtype::kFloat16);
}  // namespace entwine
