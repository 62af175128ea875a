// What the blocks of a grid do together: the last of them goes on with what all have written.
#pragma once
#include "launch.h"

namespace hvc {
namespace {

// Whether this block is the last one of its grid to come here; then it sees what the others have written before. All
// threads of a block call it; `arrived` begins with 0.
__device__ inline bool is_last_block(unsigned* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// The bin of a histogram in which the rank-th largest is, or the lowest where there are fewer; its rank there; how many
// the histogram holds. A block of kThreads finds it; the number of bins is a multiple of that.
struct Ranked {
  int bin;
  int64_t rank, total;
};
__device__ inline Ranked bin_of_rank(const int64_t* bins, int number, int64_t rank) {
  __shared__ int64_t sums[kThreads];
  __shared__ Ranked found;
  const int thread = int(threadIdx.x), each = number / kThreads, end = number - thread * each;
  int64_t mine = 0;
  for (int i = 1; i <= each; ++i) mine += __ldcg(bins + end - i);
  sums[thread] = mine;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  const int64_t before = sums[thread] - mine, total = sums[kThreads - 1];
  const bool first = thread == 0 || rank > before, last = rank <= sums[thread] || thread == kThreads - 1;
  if (first && last) {
    int bin = end - 1;
    int64_t left = rank - before;
    for (; bin > end - each && left > __ldcg(bins + bin); --bin) left -= __ldcg(bins + bin);
    found = {bin, left, total};
  }
  __syncthreads();
  return found;
}

}  // namespace
}  // namespace hvc
