#include "launch/instance.cuh"

namespace entwine {
extern const Instance kFloat16 =
    make_instance<cutlass::half_t, /*kWTransposed=*/false, /*kTraced=*/false>(Dtype::kFloat16);
}  // namespace entwine
