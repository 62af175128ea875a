// What the kernels that write positions share: the positions of each range, found by bisection.
#pragma once
#include "rules/golomb.h"
#include "launch.h"

namespace hvc {
namespace {

// The first of the positions that is not below a bound.
__device__ inline int64_t first_from(const int32_t* positions, int64_t kept, int64_t bound) {
  int64_t low = 0, high = kept;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (positions[middle] < bound)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Calls gap(elements between) for each position of a range.
template <class Gap>
__device__ void each_gap(const int32_t* positions, int64_t kept, int parameter, int64_t range, const Gap& gap) {
  int64_t next = range * range_elements(parameter);
  const int64_t end = next + range_elements(parameter);
  for (int64_t i = first_from(positions, kept, next); i < kept && positions[i] < end; ++i) {
    gap(uint32_t(positions[i] - next));
    next = int64_t(positions[i]) + 1;
  }
}

__device__ inline int64_t bits_of_gap(uint32_t gap, int parameter) { return (gap >> parameter) + 1 + parameter; }

__global__ void validate_kernel(const int32_t* positions, int64_t kept, int64_t count, int64_t* bad) {
  for (int64_t i = first_item(); i < kept; i += item_stride())
    add_count(bad, positions[i] <= (i == 0 ? -1 : positions[i - 1]) || positions[i] >= count);
}

// Sections that cannot be read are known before any kernel starts: their ranges are counted here.
__global__ void count_kernel(int64_t* total, int64_t count) { add_count(total, count); }

}  // namespace
}  // namespace hvc
