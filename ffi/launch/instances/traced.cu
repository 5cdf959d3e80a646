#include "launch/instance.cuh"

namespace entwine {
extern const InstancePair kTraced = {
    make_instance<KernelConfig<cutlass::bfloat16_t, 256, 3, false, true>>(Dtype::kBfloat16),
    make_instance<KernelConfig<cutlass::bfloat16_t, 128, 5, false, true>>(Dtype::kBfloat16)};
}  // namespace entwine
