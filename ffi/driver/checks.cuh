// Kernels that make random inputs and compare results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "peer/control_block.h"

namespace entwine {

constexpr int kThreads = 256, kBlocks = 512;

template <class Element>
inline __device__ float to_float(Element value);
template <>
inline __device__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
inline __device__ float to_float(__half value) {
  return __half2float(value);
}
inline __device__ void round_to(float value, __nv_bfloat16* out) {
  *out = __float2bfloat16_rn(value);
}
inline __device__ void round_to(float value, __half* out) { *out = __float2half_rn(value); }

// Uniform in [-1/2, 1/2) times `scale`, from a hash of the index.
template <class Element>
__global__ void fill_random(Element* out, size_t size, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < size;
       i += size_t{kThreads} * gridDim.x) {
    uint64_t hash = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
    round_to((static_cast<float>(hash >> 40) * 0x1p-24f - 0.5f) * scale, out + i);
  }
}

// What rounding to the element type may change: a share of the value, and of subnormal ones half their
// spacing.
struct Rounding {
  double share, least;
};

// Compares sampled elements of x @ w with a float64 dot product, one block a sample.
template <class Element>
__global__ void check_partial(const Element* x, const Element* w, const Element* product, int64_t m,
                              int64_t n, int64_t k, bool w_transposed, Rounding rounding,
                              unsigned long long* wrong) {
  const uint64_t hash = (blockIdx.x + 1) * 0x9e3779b97f4a7c15ull;
  // The corners first: where tiles are cut off.
  const int64_t row = blockIdx.x < 4 ? (blockIdx.x & 1 ? m - 1 : 0) : hash % m;
  const int64_t column = blockIdx.x < 4 ? (blockIdx.x & 2 ? n - 1 : 0) : (hash >> 32) % n;
  __shared__ double sums[kThreads], magnitudes[kThreads];
  double sum = 0, magnitude = 0;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    const double term =
        static_cast<double>(to_float(x[row * k + i])) *
        static_cast<double>(to_float(w[w_transposed ? column * k + i : i * n + column]));
    sum += term;
    magnitude += fabs(term);
  }
  sums[threadIdx.x] = sum;
  magnitudes[threadIdx.x] = magnitude;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; i++) {
    sum += sums[i];
    magnitude += magnitudes[i];
  }
  // One rounding to the element type, and float32 accumulation over k terms.
  const double allowed =
      fmax(fabs(sum) * rounding.share, rounding.least) * 1.01 + magnitude * 0x1p-19;
  const double seen = to_float(product[row * n + column]);
  if (!(fabs(seen - sum) <= allowed)) atomicAdd(wrong, 1ull);
}

// x [rows, k] with zeros in all columns but those from `first` to before `last`.
template <class Element>
__global__ void take_columns(Element* taken, const Element* x, size_t size, int64_t k,
                             int64_t first, int64_t last) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < size;
       i += size_t{kThreads} * gridDim.x) {
    const int64_t column = i % k;
    if (column >= first && column < last) {
      taken[i] = x[i];
    } else {
      round_to(0.0f, &taken[i]);
    }
  }
}

// The products of all ranks by parts of k, or of one rank alone where nothing is summed.
template <class Element>
struct Partials {
  const Element* product[kMaxSources];
  int num_products;
};

// Which rows of the products an output has: num_batches blocks of block_rows, `stride` rows apart, the
// first at `first_row`.
struct OutputRows {
  int64_t block_rows, stride, first_row;
};

template <class Element>
__global__ void check_sum(Partials<Element> partials, OutputRows rows, const uint16_t* output,
                          size_t size, int64_t n, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < size;
       i += size_t{kThreads} * gridDim.x) {
    const int64_t row = i / n, column = i % n;
    const int64_t batch = row / rows.block_rows;
    const size_t at = (rows.first_row + batch * rows.stride + row % rows.block_rows) * n + column;
    float sum = 0;
    for (int r = 0; r < partials.num_products; r++) sum += to_float(partials.product[r][at]);
    Element rounded;
    round_to(sum, &rounded);
    const uint16_t expected = reinterpret_cast<const uint16_t&>(rounded);
    // A sum from 0 has no -0; a product that is not summed may be one.
    const bool both_zero = ((expected | output[i]) & 0x7fff) == 0;
    if (expected != output[i] && !both_zero) atomicAdd(wrong, 1ull);
  }
}

}  // namespace entwine
