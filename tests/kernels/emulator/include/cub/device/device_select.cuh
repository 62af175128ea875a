// CUB's selection, one after the other.
#pragma once
#include "cuda_runtime.h"

namespace cub {

struct DeviceSelect {
  template <class In, class Out, class Found, class Count, class Choose>
  static cudaError_t If(void* memory, size_t& bytes, In from, Out into, Found found, Count count, Choose choose,
                        cudaStream_t) {
    bytes = 1;
    if (!memory) return cudaSuccess;
    Count kept = 0;
    for (Count i = 0; i < count; ++i) {
      const auto value = from[i];
      if (choose(value)) into[kept++] = value;
    }
    *found = kept;
    return cudaSuccess;
  }
};

}  // namespace cub
