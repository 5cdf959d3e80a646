#include "launch/instance.cuh"

namespace entwine {
extern const Instances kBfloat16 =
    make_instances<cutlass::bfloat16_t, /*kWTransposed=*/false, /*kTraced=*/false>(
        Dtype::kBfloat16);
}  // namespace entwine
