// What the blocks of a grid do together: the last of them goes on with what all have written.
#pragma once
#include "launch.h"

namespace hvc {
namespace {

// Whether this block is the last of so many to come here; then it sees what the others have written before. All threads
// of a block call it; `arrived` begins with 0.
__device__ inline bool is_last_of(unsigned* arrived, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}
__device__ inline bool is_last_block(unsigned* arrived) { return is_last_of(arrived, gridDim.x); }

// The bin of a histogram in which the rank-th largest is, or the lowest where there are fewer; its rank there; how many
// the histogram holds. A block of kThreads finds it: every thread has some bins, the first one those at the top.
struct Ranked {
  int bin;
  int64_t rank, total;
};
template <int kBins> __device__ Ranked bin_of_rank(const int64_t* bins, int64_t rank) {
  constexpr int kEach = kBins / kThreads;
  static_assert(kEach * kThreads == kBins, "threads have equal parts");
  __shared__ int64_t sums[kThreads];
  __shared__ Ranked found;
  const int thread = int(threadIdx.x), top = kBins - 1 - thread * kEach;
  int64_t counts[kEach], mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) mine += counts[i] = __ldcg(bins + top - i);
  sums[thread] = mine;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  const int64_t before = sums[thread] - mine, total = sums[kThreads - 1];
  const bool is_first = thread == 0 || rank > before, is_last = rank <= sums[thread] || thread == kThreads - 1;
  if (is_first && is_last) {
    int64_t left = rank - before;
    int below = 0;  // bins that are passed over
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
      const bool passes = below == i && left > counts[i];
      left -= passes ? counts[i] : 0;
      below += passes;
    }
    found = {top - below, left, total};
  }
  __syncthreads();
  return found;
}

}  // namespace
}  // namespace hvc
