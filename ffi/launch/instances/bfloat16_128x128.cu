#include "launch/instance.cuh"

namespace entwine {
extern const InstancePair kBfloat16Tile128 =
    make_instances<cutlass::bfloat16_t, 128, /*kNumStages=*/5>(Dtype::kBfloat16);
}  // namespace entwine
