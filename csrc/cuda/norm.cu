// The norm of every block of a gradient, and how many values are not finite, in one pass.
#include "hvc/norm.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

// What a pass finds of every block; absent where it is not wanted.
struct Found {
  double *largest, *sums;
  int64_t* nonfinite;
};

// ---- kernels ----------------------------------------------------------------------------------------------

__device__ inline double largest_of_warp(double lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) lane = max(lane, __shfl_down_sync(kAllLanes, lane, half));
  return lane;
}

// A warp takes a block of 1024 elements of a row, lane by lane as hvc/tree.h says; a maximum needs no order.
template <Power kPower, bool kLargest, class T>
__global__ void blocks_kernel(const T* x, int64_t count, int64_t row_length, Found found) {
  const Blocks blocks = blocks_of(count, row_length);
  int64_t bad = 0;
  for (int64_t block = first_warp(); block < blocks.total; block += warp_stride()) {
    const int64_t row = block / blocks.per_row * row_length, begin = row + block % blocks.per_row * kBlock;
    const int64_t end = min(min(begin + kBlock, row + row_length), count);
    double largest = 0, sum = 0;
#pragma unroll kInFlight
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) {
      const T value = x[i];
      const bool finite = is_finite(value);
      bad += !finite;
      if (kPower != kMaximum) sum += power_of<kPower>(value);
      if (kLargest && finite) largest = max(largest, double(to_work(bit_cast<T>(magnitude_bits(value)))));
    }
    if (kPower != kMaximum) sum = combine_warp(sum);
    if (kLargest) largest = largest_of_warp(largest);
    if (lane_index() != 0) continue;
    if (kPower != kMaximum) found.sums[block] = sum;
    if (kLargest) found.largest[block] = largest;
  }
  add_count(found.nonfinite, bad);
}

// ---- launchers --------------------------------------------------------------------------------------------

// One pass for the largest |x| and for the sum of a power, or for one of them.
template <Power kPower, bool kLargest, class T>
void run(const T* x, int64_t count, int64_t row_length, Work<T>* largest, double* sums, int64_t* nonfinite,
         Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  const int64_t blocks = blocks_of(count, row_length).total;
  const Units units = units_of(count, row_length);
  const Scratch<double> block_largest(kLargest ? blocks : 0, launch);
  const Scratch<double> block_sums(kPower != kMaximum ? blocks : 0, launch);
  start(blocks_kernel<kPower, kLargest, T>, blocks * kWarp, launch, x, count, row_length,
        Found{block_largest.get(), block_sums.get(), nonfinite});
  if (kLargest) add_blocks<true>(units, block_largest.get(), largest, launch);
  if (kPower != kMaximum) add_blocks(units, block_sums.get(), sums, launch);
}

}  // namespace

void norm_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, Power power, void* norms,
                int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    double* sums = static_cast<double*>(norms);
    if (power == kMaximum)
      run<kMaximum, true>(x, count, row_length, static_cast<Work<T>*>(norms), nullptr, nonfinite, launch);
    else if (power == kPower1)
      run<kPower1, false>(x, count, row_length, nullptr, sums, nonfinite, launch);
    else if (power == kPower2)
      run<kPower2, false>(x, count, row_length, nullptr, sums, nonfinite, launch);
    else
      run<kPower4, false>(x, count, row_length, nullptr, sums, nonfinite, launch);
  });
}

void moments_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, void* largest, double* squares,
                   int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    run<kPower2, true>(static_cast<const T*>(grad), count, row_length, static_cast<Work<T>*>(largest), squares,
                       nonfinite, launch);
  });
}

}  // namespace hvc
