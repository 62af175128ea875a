// How CUDA kernels are started: on the caller's stream, never waiting, every launch checked.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "rules/numbers.h"

namespace hvc {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The most blocks of a grid. The tests make it small, so that every kernel's loop goes round.
#ifndef HVC_MOST_BLOCKS
#define HVC_MOST_BLOCKS (1 << 20)
#endif
constexpr int64_t kMostBlocks = HVC_MOST_BLOCKS;

// The runtime keeps an error until somebody asks for it, and CUB would take it for one of its own: after memory that
// was not there, the next call must find none.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline cudaStream_t stream_of(Launch launch) { return static_cast<cudaStream_t>(launch.stream); }

// Starts so many blocks of threads. Through the runtime's function and not <<<>>>, which is no C++: the tests run these
// texts without a GPU.
template <class... Parameters, class... Arguments> void start_blocks(void (*kernel)(Parameters...), int64_t blocks,
                                                                     int threads, Launch launch,
                                                                     const Arguments&... arguments) {
  cudaLaunchConfig_t grid{};
  grid.gridDim = dim3(unsigned(blocks));
  grid.blockDim = dim3(unsigned(threads));
  grid.stream = stream_of(launch);
  check(cudaLaunchKernelEx(&grid, kernel, arguments...), "kernel launch");
}

// Starts `kernel` with about one thread per item; kernels loop, so a grid of a million blocks is enough for all.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), int64_t items, Launch launch, const Arguments&... arguments) {
  if (items == 0) return;
  start_blocks(kernel, std::min(ceil_div(items, kThreads), kMostBlocks), kThreads, launch, arguments...);
}

// The same with a block of threads for each of so many groups of items.
template <class... Parameters, class... Arguments>
void start_groups(void (*kernel)(Parameters...), int64_t groups, Launch launch, const Arguments&... arguments) {
  if (groups > 0) start_blocks(kernel, std::min(groups, kMostBlocks), kThreads, launch, arguments...);
}

// The same for long work on few items, such as a thread for each range of a section: small blocks, which many of the
// GPU's multiprocessors share.
template <class... Parameters, class... Arguments>
void start_spread(void (*kernel)(Parameters...), int64_t items, Launch launch, const Arguments&... arguments) {
  if (items == 0) return;
  start_blocks(kernel, std::min(ceil_div(items, kWarp), kMostBlocks), kWarp, launch, arguments...);
}

inline void clear(void* memory, int64_t bytes, Launch launch) {
  if (bytes > 0) check(cudaMemsetAsync(memory, 0, size_t(bytes), stream_of(launch)), "cudaMemsetAsync");
}

// Scratch memory comes from a pool of its own for each device, which gives nothing back: after the first steps no
// kernel waits for the driver.
inline cudaMemPool_t memory_pool() {
  constexpr int kDevices = 64;
  static std::array<cudaMemPool_t, kDevices> pools{};
  static std::array<std::once_flag, kDevices> made;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kDevices) throw std::runtime_error("more than 64 CUDA devices");
  std::call_once(made[size_t(device)], [&] {
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location.type = cudaMemLocationTypeDevice;
    wanted.location.id = device;
    cudaMemPool_t pool;
    check(cudaMemPoolCreate(&pool, &wanted), "cudaMemPoolCreate");
    uint64_t kept = ~uint64_t(0);
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "cudaMemPoolSetAttribute");
    pools[size_t(device)] = pool;
  });
  return pools[size_t(device)];
}

// Memory that lives until the work queued so far is done.
template <class T> class Scratch {
 public:
  Scratch(int64_t count, Launch launch) : stream_(stream_of(launch)) {
    if (count <= 0) return;
    auto** memory = reinterpret_cast<void**>(&data_);
    const size_t bytes = size_t(count) * sizeof(T);
    check(cudaMallocFromPoolAsync(memory, bytes, memory_pool(), stream_), "cudaMallocFromPoolAsync");
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_) cudaFreeAsync(data_, stream_);
  }
  T* get() const { return data_; }

 private:
  cudaStream_t stream_;
  T* data_ = nullptr;
};

__device__ inline int64_t first_item() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t item_stride() { return int64_t(gridDim.x) * blockDim.x; }

// The same for kernels in which a warp works on one item.
__device__ inline int lane_index() { return int(threadIdx.x) % kWarp; }
__device__ inline int64_t first_warp() { return first_item() / kWarp; }
__device__ inline int64_t warp_stride() { return item_stride() / kWarp; }

// Counts are integers: the order in which they arrive does not matter.
__device__ inline void add_count(int64_t* total, int64_t count) {
  if (count != 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(count));
}

}  // namespace hvc
