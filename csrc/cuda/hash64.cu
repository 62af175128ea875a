// The 64-bit hash: blocks in any order, their hashes chained in index order.
#include "rules/hash64.h"
#include "launch.h"

namespace hvc {
namespace {

static_assert(kHashLanes == kWarp, "a warp hashes a block");

// ---- helpers ----------------------------------------------------------------------------------------------

// A word at any alignment; bytes past the end are 0.
__device__ uint64_t word_at(const uint8_t* data, int64_t at, int64_t bytes) {
  if (at + 8 <= bytes && reinterpret_cast<uintptr_t>(data + at) % 8 == 0)
    return *reinterpret_cast<const uint64_t*>(data + at);
  uint64_t word = 0;
  for (int byte = 0; byte < 8 && at + byte < bytes; ++byte) word |= uint64_t(data[at + byte]) << (8 * byte);
  return word;
}

// ---- kernels ----------------------------------------------------------------------------------------------

__global__ void hash_blocks_kernel(const uint8_t* data, int64_t bytes, int64_t blocks, uint64_t* hashes) {
  for (int64_t block = first_warp(); block < blocks; block += warp_stride()) {
    const int64_t begin = block * kHashBlockBytes;
    const int64_t end = begin + kHashBlockBytes < bytes ? begin + kHashBlockBytes : bytes;
    uint64_t state = hash_lane_start(lane_index());
    for (int64_t at = begin + 8 * lane_index(); at < end; at += 8 * kWarp) hash_absorb(state, word_at(data, at, end));
    uint64_t hash = 0;
    for (int lane = 0; lane < kWarp; ++lane) hash = hash_chain(hash, __shfl_sync(kAllLanes, state, lane));
    if (lane_index() == 0) hashes[block] = hash;
  }
}

// One warp: each chaining waits for the one before, and for nothing else. So 32 hashes are fetched at once, before they
// are needed, and only the last group asks how many are left.
__global__ void chain_kernel(const uint64_t* hashes, int64_t blocks, int64_t bytes, uint64_t seed, uint64_t* out) {
  const auto load = [&](int64_t first) { return first + lane_index() < blocks ? hashes[first + lane_index()] : 0; };
  uint64_t hash = hash_mix(seed), mine = load(0);
  int64_t first = 0;
  for (; first + kWarp <= blocks; first += kWarp) {
    const uint64_t later = load(first + kWarp);
    uint64_t group[kWarp];
#pragma unroll
    for (int lane = 0; lane < kWarp; ++lane) group[lane] = __shfl_sync(kAllLanes, mine, lane);
#pragma unroll
    for (int lane = 0; lane < kWarp; ++lane) hash = hash_chain(hash, group[lane]);
    mine = later;
  }
  for (int lane = 0; first + lane < blocks; ++lane) hash = hash_chain(hash, __shfl_sync(kAllLanes, mine, lane));
  if (lane_index() == 0) *out = hash_chain(hash, uint64_t(bytes));
}

}  // namespace

// ---- launchers --------------------------------------------------------------------------------------------

// Waits for its stream, as few entry points do: its result is a number for the host.
uint64_t hash64(const void* data, int64_t bytes, uint64_t seed, Launch launch) {
  const int64_t blocks = ceil_div(bytes, kHashBlockBytes);
  const Scratch<uint64_t> hashes(blocks, launch), result(1, launch);
  start(hash_blocks_kernel, blocks * kWarp, launch, static_cast<const uint8_t*>(data), bytes, blocks, hashes.get());
  start_blocks(chain_kernel, 1, kWarp, launch, hashes.get(), blocks, bytes, seed, result.get());
  uint64_t hash = 0;
  check(cudaMemcpyAsync(&hash, result.get(), sizeof hash, cudaMemcpyDeviceToHost, stream_of(launch)),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_of(launch)), "cudaStreamSynchronize");
  return hash;
}

}  // namespace hvc
