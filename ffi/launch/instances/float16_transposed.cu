#include "launch/instance.cuh"

namespace entwine {
extern const Instance kFloat16Transposed =
    make_instance<cutlass::half_t, /*kWTransposed=*/true, /*kTraced=*/false>(Dtype::kFloat16);
}  // namespace entwine
