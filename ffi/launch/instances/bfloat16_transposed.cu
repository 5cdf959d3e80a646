#include "launch/instance.cuh"

namespace entwine {
extern const Instances kBfloat16Transposed =
    make_instances<cutlass::bfloat16_t, /*kWTransposed=*/true, /*kTraced=*/false>(Dtype::kBfloat16);
}  // namespace entwine
