#include "launch/instance.cuh"

namespace entwine {
extern const InstancePair kFloat16Tile256 =
    make_instances<cutlass::half_t, 256, /*kNumStages=*/3>(Dtype::kFloat16);
}  // namespace entwine
