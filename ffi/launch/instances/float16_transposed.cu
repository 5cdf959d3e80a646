#include "launch/instance.cuh"

namespace entwine {
extern const Instances kFloat16Transposed =
    make_instances<cutlass::half_t, /*kWTransposed=*/true, /*kTraced=*/false>(Dtype::kFloat16);
}  // namespace entwine
