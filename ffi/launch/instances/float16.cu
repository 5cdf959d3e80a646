#include "launch/instance.cuh"

namespace entwine {
extern const Instances kFloat16 =
    make_instances<cutlass::half_t, /*kWTransposed=*/false, /*kTraced=*/false>(Dtype::kFloat16);
}  // namespace entwine
