// What the kernels use of CUDA, for g++: threads of a block are fibers of one thread, streams are done at once.
//
// Lanes of a warp meet at shuffles, votes and barriers, and nowhere else: between them a fiber runs alone. A shuffle or
// vote that not all lanes of a warp reach, or not in the same line, ends the process, as what a GPU then does is
// undefined; so does a barrier that threads of a block reach in different lines. Memory that kernels
// ask for is poisoned and has guards around it. Rules that a GPU computes with instructions of its own (see the few
// places with __CUDA_ARCH__ in csrc/rules) are those of the CPU here.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

// ---- where a thread is --------------------------------------------------------------------------------------

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
struct int2 {
  int x, y;
};

inline dim3 threadIdx(0), blockIdx(0), blockDim, gridDim;

// ---- starting kernels ---------------------------------------------------------------------------------------

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace emulator {

using Body = void (*)(void*);
void run_grid(dim3 grid, dim3 block, Body body, void* argument);

}  // namespace emulator

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... given) {
  auto call = [kernel, arguments = std::tuple<Parameters...>(std::forward<Arguments>(given)...)] {
    std::apply(kernel, arguments);
  };
  using Call = decltype(call);
  emulator::run_grid(config->gridDim, config->blockDim, [](void* body) { (*static_cast<Call*>(body))(); }, &call);
  return cudaSuccess;
}

// ---- where threads meet -------------------------------------------------------------------------------------

namespace emulator {

// Waits until all lanes of the warp have called this at the same place; returns what each of them brought.
struct Place {
  const char* name;
  int line;
};
const uint64_t* meet_warp(Place place, uint64_t value);
void meet_block(Place place);

template <class V> uint64_t packed(V value) {
  static_assert(sizeof(V) <= 8, "at most 64 bits travel between lanes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class V> V unpacked(uint64_t bits) {
  V value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr unsigned kLanesOfWarp = 32;
inline unsigned lane() { return threadIdx.x % kLanesOfWarp; }

// Lanes outside the warp give the caller's own value.
template <class V> V fetch_lane(Place place, V value, unsigned from) {
  const uint64_t* all = meet_warp(place, packed(value));
  return from < kLanesOfWarp ? unpacked<V>(all[from]) : value;
}

}  // namespace emulator

inline void __syncthreads(int line = __builtin_LINE()) { emulator::meet_block({"__syncthreads", line}); }
inline int __syncthreads_count(bool vote, int line = __builtin_LINE()) {
  static int votes;
  votes += vote;
  emulator::meet_block({"__syncthreads_count", line});
  const int found = votes;
  emulator::meet_block({"__syncthreads_count, the second time", line});
  votes -= vote;
  return found;
}
inline void __syncwarp(int line = __builtin_LINE()) { emulator::meet_warp({"__syncwarp", line}, 0); }
inline unsigned __ballot_sync(unsigned, bool vote, int line = __builtin_LINE()) {
  const uint64_t* all = emulator::meet_warp({"__ballot_sync", line}, vote);
  unsigned bits = 0;
  for (unsigned i = 0; i < emulator::kLanesOfWarp; ++i) bits |= unsigned(all[i] != 0) << i;
  return bits;
}
template <class V> V __shfl_sync(unsigned, V value, int from, int line = __builtin_LINE()) {
  return emulator::fetch_lane({"__shfl_sync", line}, value, unsigned(from) % emulator::kLanesOfWarp);
}
template <class V> V __shfl_down_sync(unsigned, V value, int step, int line = __builtin_LINE()) {
  return emulator::fetch_lane({"__shfl_down_sync", line}, value, emulator::lane() + unsigned(step));
}
template <class V> V __shfl_up_sync(unsigned, V value, int step, int line = __builtin_LINE()) {
  return emulator::fetch_lane({"__shfl_up_sync", line}, value, emulator::lane() - unsigned(step));
}
template <class V> V __shfl_xor_sync(unsigned, V value, int mask, int line = __builtin_LINE()) {
  return emulator::fetch_lane({"__shfl_xor_sync", line}, value, emulator::lane() ^ unsigned(mask));
}

// Nothing runs at the same time, so all memory is up to date.
inline void __threadfence() {}
template <class V> V __ldcg(const V* at) { return *at; }

// ---- arithmetic ---------------------------------------------------------------------------------------------

template <class I> I atomicAdd(I* at, I value) { return std::exchange(*at, I(*at + value)); }
template <class I> I atomicOr(I* at, I value) { return std::exchange(*at, I(*at | value)); }
template <class I> I atomicAnd(I* at, I value) { return std::exchange(*at, I(*at & value)); }
template <class I> I atomicMax(I* at, I value) { return std::exchange(*at, *at < value ? value : *at); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
inline int __clzll(long long bits) { return bits == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(bits)); }

// Of a number and a NaN CUDA takes the number.
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<Both>::value) return std::fmin(Both(a), Both(b));
  return Both(b) < Both(a) ? Both(b) : Both(a);
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point<Both>::value) return std::fmax(Both(a), Both(b));
  return Both(a) < Both(b) ? Both(b) : Both(a);
}
