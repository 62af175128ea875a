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

}  // namespace hvc
