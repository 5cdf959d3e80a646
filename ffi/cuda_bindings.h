// The part of the Python module that only a CUDA build has.
#pragma once

#include <nanobind/nanobind.h>

namespace entwine {

void bind_cuda(nanobind::module_& m);

}  // namespace entwine
