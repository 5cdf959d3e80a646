#include "launch/instance.cuh"

namespace entwine {
extern const Instances kTraced =
    make_instances<cutlass::bfloat16_t, /*kWTransposed=*/false, /*kTraced=*/true>(Dtype::kBfloat16);
}  // namespace entwine
