#include "launch/instance.cuh"

namespace entwine {
extern const Instance kBfloat16Transposed =
    make_instance<cutlass::bfloat16_t, /*kWTransposed=*/true, /*kTraced=*/false>(Dtype::kBfloat16);
}  // namespace entwine
