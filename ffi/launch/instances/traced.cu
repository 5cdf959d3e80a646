#include "launch/instance.cuh"

namespace entwine {
extern const Instance kTraced =
    make_instance<cutlass::bfloat16_t, /*kWTransposed=*/false, /*kTraced=*/true>(Dtype::kBfloat16);
}  // namespace entwine
