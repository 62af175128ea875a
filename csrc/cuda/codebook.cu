// The levels that values are sent as. One block fits those of a tensor: few values are sent.
#include "rules/codebook.h"

#include "launch.h"
#include "visit.h"

namespace hvc {
namespace {

// What a block counts. The lowest magnitude is kept as its complement, so that both ends are maxima.
struct Counted {
  unsigned long long sums[kCells];
  unsigned numbers[kCells];
  unsigned high, complement_of_low;
};

__device__ void clear_cells(Counted& c) {
  for (int cell = int(threadIdx.x); cell < kCells; cell += kThreads) c.sums[cell] = c.numbers[cell] = 0;
  if (threadIdx.x == 0) c.high = c.complement_of_low = 0;
  __syncthreads();
}

template <class W> __device__ void find_ends(const W* values, int64_t count, Counted& c) {
  unsigned high = 0, complement = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t magnitude = float_magnitude(values[i]);
    high = max(high, magnitude), complement = max(complement, ~magnitude);
  }
  atomicMax(&c.high, high);
  atomicMax(&c.complement_of_low, complement);
  __syncthreads();
}

template <class W> __global__ void fit_kernel(const W* values, int64_t count, int levels, float* out) {
  __shared__ Counted c;
  __shared__ double sums[kCells + 1], numbers[kCells + 1];
  __shared__ int edges[kMostLevels + 1];
  clear_cells(c);
  find_ends(values, count, c);
  const uint32_t low = count ? ~c.complement_of_low : 0;
  const int shift = cell_shift(low, c.high);
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t magnitude = float_magnitude(values[i]), cell = (magnitude - low) >> shift;
    atomicAdd(&c.sums[cell], static_cast<unsigned long long>(magnitude));
    atomicAdd(&c.numbers[cell], 1u);
  }
  __syncthreads();
  for (int cell = int(threadIdx.x); cell < kCells; cell += kThreads) {
    numbers[cell + 1] = double(c.numbers[cell]);
    sums[cell + 1] = cell_mean(c.sums[cell], c.numbers[cell]) * numbers[cell + 1];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  sums[0] = numbers[0] = 0;
  for (int cell = 0; cell < kCells; ++cell) {
    sums[cell + 1] = sums[cell] + sums[cell + 1];
    numbers[cell + 1] = numbers[cell] + numbers[cell + 1];
  }
  fit_levels({sums, numbers}, low, shift, levels, edges, out);
}

}  // namespace

void codebook_fit(const void* values, Dtype dtype, int64_t count, int bits, float* levels, Launch launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    start_blocks(fit_kernel<W>, 1, kThreads, launch, static_cast<const W*>(values), count, codebook_levels(bits),
                 levels);
  });
}

}  // namespace hvc
