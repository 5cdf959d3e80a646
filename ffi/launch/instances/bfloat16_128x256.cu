#include "launch/instance.cuh"

namespace entwine {
extern const InstancePair kBfloat16Tile256 =
    make_instances<cutlass::bfloat16_t, 256, /*kNumStages=*/3>(Dtype::kBfloat16);
}  // namespace entwine
