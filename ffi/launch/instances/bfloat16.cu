#include "launch/instance.cuh"

namespace entwine {
extern const Instance kBfloat16 =
    make_instance<cutlass::bfloat16_t, /*kWTransposed=*/false, /*kTraced=*/false>(Dtype::kBfloat16);
}  // namespace entwine
