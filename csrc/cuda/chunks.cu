// The largest elements of every chunk of a tensor: a block takes a chunk, its threads hold the magnitudes.
#include "rules/chunks.h"

#include "rows.h"
#include "scan.h"
#include "select_operands.h"
#include "visit.h"

namespace hvc {
namespace {

constexpr int kOfThread = kMostChunk / kThreads, kWarps = kThreads / kWarp, kSteps = kOfThread * kWarps;

// Adds up a number of each thread; all of them get the sum.
__device__ inline int sum_of_block(int mine, int* of_warps) {
  for (int half = kWarp / 2; half > 0; half /= 2) mine += __shfl_xor_sync(kAllLanes, mine, half);
  if (lane_index() == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  int sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  __syncthreads();
  return sum;
}

// Of each 32 elements, in their order: how many equal the cut, and how many are kept.
struct Tallies {
  int ties[kSteps], kept[kSteps];
};
__device__ inline int before_step(const int* of_steps, int step) {
  int sum = 0;
  for (int i = 0; i < step; ++i) sum += of_steps[i];
  return sum;
}

// A chunk in registers: element 256 i + thread is the thread's i-th; 0 for NaN.
template <class W> struct Held {
  W x[kOfThread];

  __device__ Key<W> key(int i) const { return key_of(x[i]); }
};
template <class T>
__device__ void load_chunk(const Input<T>& in, int64_t begin, int64_t size, Held<Work<T>>& held, int64_t* nonfinite) {
  using K = Key<Work<T>>;
  int64_t bad = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int64_t at = i * kThreads + int64_t(threadIdx.x);
    const bool inside = at < size;
    const Work<T> x = inside ? offered(in.grad, in.residual, begin + at) : Work<T>(0);
    bad += !is_finite(x);
    held.x[i] = key_of(x) > K(kInfinityBits<Work<T>>) ? Work<T>(0) : x;
  }
  add_count(nonfinite, bad);
}

// Writes what is kept of a chunk, in order, at its place; returns how much.
template <class W> __device__ int keep_of_chunk(const Held<W>& held, Cut<Key<W>> cut, int64_t begin, Tallies& tallies,
                                                int32_t* positions, W* values) {
  const int warp = int(threadIdx.x) / kWarp;
  const unsigned lower = (1u << lane_index()) - 1;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const unsigned ties = __ballot_sync(kAllLanes, held.key(i) == cut.key);
    const unsigned above = __ballot_sync(kAllLanes, held.key(i) > cut.key);
    if (lane_index() == 0) tallies.ties[i * kWarps + warp] = __popc(ties);
    if (lane_index() == 0) tallies.kept[i * kWarps + warp] = __popc(above);
  }
  __syncthreads();
  // In place: a thread knows what is before its step, then all write.
  const int step = int(threadIdx.x);
  int ties_before = 0;
  if (step < kSteps) {
    ties_before = before_step(tallies.ties, step);
    const int left = max(int(cut.ties) - ties_before, 0);
    tallies.kept[step] += min(tallies.ties[step], left);
  }
  __syncthreads();
  const int kept_before = step < kSteps ? before_step(tallies.kept, step) : 0;
  const int kept = before_step(tallies.kept, kSteps);
  __syncthreads();
  if (step < kSteps) tallies.ties[step] = ties_before, tallies.kept[step] = kept_before;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const bool tie = held.key(i) == cut.key;
    const unsigned ties = __ballot_sync(kAllLanes, tie);
    const bool first = tallies.ties[i * kWarps + warp] + __popc(ties & lower) < int(cut.ties);
    const bool keeps = held.key(i) > cut.key || (tie && first);
    const unsigned all = __ballot_sync(kAllLanes, keeps);
    const int at = tallies.kept[i * kWarps + warp] + __popc(all & lower);
    if (keeps) positions[at] = int32_t(begin + i * kThreads + threadIdx.x), values[at] = held.x[i];
  }
  __syncthreads();
  return kept;
}

template <class T> __global__ void select_kernel(Input<T> in, ChunkShape s, int32_t* positions, Work<T>* values,
                                                 int64_t* kept, int64_t* nonfinite) {
  using W = Work<T>;
  using K = Key<W>;
  __shared__ Tallies tallies;
  __shared__ int of_warps[kWarps];
  for (int64_t index = blockIdx.x; index < number_of_chunks(s); index += gridDim.x) {
    const int64_t begin = index * s.chunk;
    Held<W> held;
    load_chunk(in, begin, chunk_size(s, index), held, nonfinite);
    const auto at_least = [&](K bound) {
      int number = 0;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) number += held.key(i) >= bound;
      return int64_t(sum_of_block(number, of_warps));
    };
    const Cut<K> cut = cut_of_chunk(K(kInfinityBits<W>), kept_of_chunk(s, index), at_least);
    const int64_t at = index * s.k;
    const int number = keep_of_chunk(held, cut, begin, tallies, positions + at, values + at);
    if (threadIdx.x == 0) kept[index] = number;
  }
}

// Brings what the chunks have kept together; `before` ends with how much that is.
template <class W> __global__ void join_kernel(ChunkShape s, const int64_t* before, const int32_t* positions,
                                               const W* values, int32_t* out, W* out_values, int64_t* size) {
  const int64_t chunks = number_of_chunks(s);
  if (first_item() == 0) *size = before[chunks];
  for (int64_t index = first_warp(); index < chunks; index += warp_stride()) {
    const int64_t to = before[index], number = before[index + 1] - to;
    for (int64_t i = lane_index(); i < number; i += kWarp) {
      out[to + i] = positions[index * s.k + i];
      out_values[to + i] = values[index * s.k + i];
    }
  }
}

}  // namespace

void chunk_select(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t chunk, int64_t k,
                  int64_t last, int32_t* positions, void* values, int64_t* numbers, Launch launch) {
  clear(numbers, kSelected * int64_t(sizeof *numbers), launch);
  const ChunkShape s{count, chunk, k, last};
  const int64_t chunks = number_of_chunks(s);
  if (chunks == 0) return;
  const Scratch<int64_t> kept(chunks + 1, launch);
  const Scratch<int32_t> places(chunks * k, launch);
  clear(kept.get() + chunks, sizeof(int64_t), launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const Scratch<W> found(chunks * k, launch);
    const Input<T> in = input<T>(grad, residual, count, k);
    start_blocks(select_kernel<T>, std::min(chunks, kMostBlocks), kThreads, launch, in, s, places.get(), found.get(),
                 kept.get(), numbers + 1);
    prefix_sums(kept.get(), kept.get(), chunks + 1, launch);
    start(join_kernel<W>, chunks * kWarp, launch, s, kept.get(), places.get(), found.get(), positions,
          static_cast<W*>(values), numbers);
  });
}

}  // namespace hvc
