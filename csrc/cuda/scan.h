// Prefix sums of integers.
#pragma once
#include <cub/device/device_scan.cuh>

#include "launch.h"

namespace hvc {

// sums[i] = values[0] + ... + values[i - 1] for i in [0, count); both may be the same memory.
inline void prefix_sums(const int64_t* values, int64_t* sums, int64_t count, Launch launch) {
  if (count == 0) return;
  size_t bytes = 0;
  check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, values, sums, count, stream_of(launch)), "ExclusiveSum");
  const Scratch<char> memory(int64_t(bytes), launch);
  check(cub::DeviceScan::ExclusiveSum(memory.get(), bytes, values, sums, count, stream_of(launch)), "ExclusiveSum");
}

// A result for the host: the only thing here that waits for the stream.
template <class V> void fetch(V* into, const V* from, int64_t count, Launch launch) {
  check(cudaMemcpyAsync(into, from, size_t(count) * sizeof *from, cudaMemcpyDeviceToHost, stream_of(launch)),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_of(launch)), "cudaStreamSynchronize");
}

// The sum of what the lanes before this one hold; `all` is that of all lanes.
template <class I> __device__ I sum_before(I mine, I& all) {
  I sum = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const I other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane_index() >= step) sum += other;
  }
  all = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - mine;
}

// The same of value(0) to value(count - 1), by a block of kThreads; returns the sum of all.
template <class Value> __device__ int64_t prefix_sums_of_block(int64_t count, const Value& value, int64_t* sums) {
  constexpr int kEach = 4;
  __shared__ int64_t of_warps[kThreads / kWarp];
  int64_t total = 0;
  for (int64_t group = 0; group < count; group += kEach * kThreads) {
    const int64_t first = group + kEach * threadIdx.x;
    int64_t mine[kEach], sum = 0, all;
#pragma unroll
    for (int k = 0; k < kEach; ++k) mine[k] = first + k < count ? value(first + k) : 0;
    for (int k = 0; k < kEach; ++k) sum += mine[k];
    int64_t before = total + sum_before(sum, all);
    if (lane_index() == 0) of_warps[threadIdx.x / kWarp] = all;
    __syncthreads();
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      if (warp < int(threadIdx.x) / kWarp) before += of_warps[warp];
      total += of_warps[warp];
    }
    for (int k = 0; k < kEach; ++k) {
      if (first + k < count) sums[first + k] = before;
      before += mine[k];
    }
    __syncthreads();
  }
  return total;
}

// The first index of [0, count) that is not below, or count; those that are below come first. All lanes of a warp
// search together, in 32 parts at a time.
template <class Below> __device__ int64_t first_not_below(int64_t count, const Below& below) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t step = ceil_div(high - low, kWarp), probe = min(low + step * (lane_index() + 1), high) - 1;
    const int lower = __popc(__ballot_sync(kAllLanes, below(probe)));
    high = lower < kWarp ? min(low + step * (lower + 1), high) - 1 : high;
    low = min(low + step * lower, high);
  }
  return low;
}

}  // namespace hvc
