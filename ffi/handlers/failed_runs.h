// What kept a run of a program from being set up, told by Execute on all of its devices.
//
// XLA ends only the device that returns an error from Prepare or Initialize. The others would go on and wait
// for it: in the exchange of another group, or where XLA gathers its devices before they execute, which
// ends the process after half a minute. So these stages note what failed on one device, and go on too; errors
// that all devices have alike, such as wrong attributes, they return.
#pragma once

#include <functional>

#include "xla/ffi/api/ffi.h"

namespace entwine {

// Notes what `body` throws.
void note_failure(xla::ffi::RunId run, const std::function<void()>& body);
// Throws what was noted for the run on any device, preferably by the rank that itself failed.
void throw_noted_failure(xla::ffi::RunId run);

}  // namespace entwine
