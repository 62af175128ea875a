// CUB's prefix sums, one after the other.
#pragma once
#include "cuda_runtime.h"

namespace cub {

struct DeviceScan {
  template <class In, class Out, class Count>
  static cudaError_t ExclusiveSum(void* memory, size_t& bytes, In from, Out into, Count count, cudaStream_t) {
    bytes = 1;
    if (!memory) return cudaSuccess;
    auto sum = *from - *from;
    for (Count i = 0; i < count; ++i) {
      const auto value = from[i];
      into[i] = sum;
      sum += value;
    }
    return cudaSuccess;
  }
};

}  // namespace cub
