// The levels that values are sent as. Blocks count some values each, and the last of them fits the levels.
#include "rules/codebook.h"

#include "grid.h"
#include "visit.h"

namespace hvc {
namespace {

// So many values of each thread at once. What those of a block have beyond the beginnings of their cells, less than
// 2^21 each, adds up in 32 bits: shared memory has no sums of 64.
constexpr int kEach = 8, kOfBlock = kEach * kThreads;

// The lowest magnitude is kept as its complement, so that both ends are maxima.
struct Ends {
  unsigned high, complement_of_low;
};

template <class Sum> struct Counted {
  Ends ends;
  unsigned arrived;
  unsigned numbers[kCells];
  Sum sums[kCells];  // of what magnitudes have beyond the beginning of their cell
};
using OfBlock = Counted<unsigned>;
using OfAll = Counted<unsigned long long>;

// Calls use(magnitude) for this thread's values of a block's kOfBlock from `first` on.
template <class W, class Use>
__device__ void each_magnitude(const W* values, int64_t first, int64_t count, const Use& use) {
  uint32_t magnitudes[kEach];
  const int64_t left = count - first - threadIdx.x;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    magnitudes[k] = k * kThreads < left ? float_magnitude(values[first + threadIdx.x + k * kThreads]) : 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (k * kThreads < left) use(magnitudes[k]);
}

// Those of what this block takes, in shared memory.
template <class W> __device__ void find_ends(const W* values, int64_t count, Ends& ends) {
  unsigned high = 0, complement = 0;
  for (int64_t first = blockIdx.x * int64_t(kOfBlock); first < count; first += gridDim.x * int64_t(kOfBlock))
    each_magnitude(values, first, count,
                   [&](uint32_t magnitude) { high = max(high, magnitude), complement = max(complement, ~magnitude); });
  atomicMax(&ends.high, high);
  atomicMax(&ends.complement_of_low, complement);
  __syncthreads();
}

template <class W> __global__ void ends_kernel(const W* values, int64_t count, OfAll* all) {
  __shared__ Ends ends;
  if (threadIdx.x == 0) ends = {};
  __syncthreads();
  find_ends(values, count, ends);
  if (threadIdx.x != 0) return;
  atomicMax(&all->ends.high, ends.high);
  atomicMax(&all->ends.complement_of_low, ends.complement_of_low);
}

// Adds what a block has counted to what all have, and begins again.
__device__ void hand_over(OfBlock& c, OfAll* all) {
  for (int cell = int(threadIdx.x); cell < kCells; cell += kThreads) {
    if (c.numbers[cell] == 0) continue;
    atomicAdd(&all->numbers[cell], c.numbers[cell]);
    atomicAdd(&all->sums[cell], static_cast<unsigned long long>(c.sums[cell]));
    c.numbers[cell] = c.sums[cell] = 0;
  }
  __syncthreads();
}

// With `all`, blocks count together, and the ends are known; without, one block does everything.
template <class W> __global__ void fit_kernel(const W* values, int64_t count, int levels, float* out, OfAll* all) {
  __shared__ OfBlock c;
  __shared__ double sums[kCells + 1], numbers[kCells + 1];
  __shared__ int edges[kMostLevels + 1];
  for (int cell = int(threadIdx.x); cell < kCells; cell += kThreads) c.numbers[cell] = c.sums[cell] = 0;
  if (threadIdx.x == 0) c.ends = all ? all->ends : Ends{};
  __syncthreads();
  if (!all) find_ends(values, count, c.ends);
  const uint32_t low = count ? ~c.ends.complement_of_low : 0;
  const int shift = cell_shift(low, c.ends.high);
  for (int64_t first = blockIdx.x * int64_t(kOfBlock); first < count; first += gridDim.x * int64_t(kOfBlock)) {
    each_magnitude(values, first, count, [&](uint32_t magnitude) {
      const uint32_t beyond = magnitude - low, cell = beyond >> shift;
      atomicAdd(&c.numbers[cell], 1u);
      atomicAdd(&c.sums[cell], beyond - (cell << shift));
    });
    __syncthreads();
    if (all) hand_over(c, all);
  }
  if (all && !is_last_block(&all->arrived)) return;
  for (int cell = int(threadIdx.x); cell < kCells; cell += kThreads) {
    const uint32_t number = all ? __ldcg(&all->numbers[cell]) : c.numbers[cell];
    const uint64_t beyond = all ? __ldcg(&all->sums[cell]) : c.sums[cell];
    numbers[cell + 1] = double(number);
    sums[cell + 1] = cell_mean(uint64_t(number) * (low + (uint32_t(cell) << shift)) + beyond, number) * double(number);
  }
  __syncthreads();
  // In order; one warp takes the sums, and another one the numbers.
  if (threadIdx.x == 0 || threadIdx.x == kWarp) {
    double* mine = threadIdx.x == 0 ? sums : numbers;
    mine[0] = 0;
#pragma unroll 8
    for (int cell = 0; cell < kCells; ++cell) mine[cell + 1] = mine[cell] + mine[cell + 1];
  }
  __syncthreads();
  if (threadIdx.x == 0) fit_levels({sums, numbers}, low, shift, levels, edges, out);
}

}  // namespace

void codebook_fit(const void* values, Dtype dtype, int64_t count, int bits, float* levels, Launch launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const auto* x = static_cast<const W*>(values);
    const int64_t blocks = std::min(ceil_div(count, kOfBlock), kMostBlocks);
    OfAll* none = nullptr;
    if (blocks <= 1)
      return start_blocks(fit_kernel<W>, 1, kThreads, launch, x, count, codebook_levels(bits), levels, none);
    const Scratch<OfAll> all(1, launch);
    clear(all.get(), sizeof(OfAll), launch);
    start_blocks(ends_kernel<W>, blocks, kThreads, launch, x, count, all.get());
    start_blocks(fit_kernel<W>, blocks, kThreads, launch, x, count, codebook_levels(bits), levels, all.get());
  });
}

}  // namespace hvc
