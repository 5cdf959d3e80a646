#include "launch/instance.cuh"

namespace entwine {
extern const InstancePair kFloat16Tile128 =
    make_instances<cutlass::half_t, 128, /*kNumStages=*/5>(Dtype::kFloat16);
}  // namespace entwine
