// The words of the CUDA runtime that ffi/launch/launch.cc uses, for a host compiler without CUDA.
#pragma once

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
