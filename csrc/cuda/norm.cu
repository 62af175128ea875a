// The norm of every block of a gradient, and how many values are not finite, in one pass.
#include "hvc/norm.h"
#include "hvc/tree.h"
#include "launch.h"
#include "visit.h"

namespace hvc {
namespace {

// ---- kernels ----------------------------------------------------------------------------------------------

// A warp takes a block of 1024 elements of a row, lane by lane as hvc/tree.h says; a maximum needs no order.
template <Power kPower, class T>
__global__ void blocks_kernel(const T* x, int64_t count, int64_t row_length, int64_t per_row, int64_t total,
                              double* parts, int64_t* nonfinite) {
  int64_t bad = 0;
  for (int64_t block = first_warp(); block < total; block += warp_stride()) {
    const int64_t row = block / per_row * row_length, begin = row + block % per_row * kBlock;
    const int64_t end = min(min(begin + kBlock, row + row_length), count);
    double value = 0;
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) {
      const bool finite = is_finite(x[i]);
      bad += !finite;
      if (kPower != kMaximum)
        value += power_of<kPower>(x[i]);
      else if (finite)
        value = max(value, double(to_work(bit_cast<T>(magnitude_bits(x[i])))));
    }
    for (int half = kWarp / 2; half > 0; half /= 2) {
      const double other = __shfl_down_sync(kAllLanes, value, half);
      value = kPower == kMaximum ? max(value, other) : value + other;
    }
    if (lane_index() == 0) parts[block] = value;
  }
  add_count(nonfinite, bad);
}

// Blocks of a superblock, then superblocks of a row, in index order.
template <bool kLargest, class Out>
__global__ void rows_kernel(const double* parts, int64_t per_row, int64_t total, int64_t rows, Out* norms) {
  constexpr int64_t kBlocks = kSuperblock / kBlock;
  for (int64_t row = first_item(); row < rows; row += item_stride()) {
    const int64_t end = min((row + 1) * per_row, total);
    double value = 0;
    for (int64_t first = row * per_row; first < end; first += kBlocks) {
      double sum = 0;
      for (int64_t block = first; block < min(first + kBlocks, end); ++block)
        sum = kLargest ? max(sum, parts[block]) : sum + parts[block];
      value = kLargest ? max(value, sum) : value + sum;
    }
    norms[row] = Out(value);
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

template <Power kPower, class T, class Out>
void run(const T* x, int64_t count, int64_t row_length, Out* norms, int64_t* nonfinite, Launch launch) {
  const int64_t per_row = ceil_div(row_length, kBlock), rows = ceil_div(count, row_length);
  const int64_t total = count / row_length * per_row + ceil_div(count % row_length, kBlock);
  const Scratch<double> parts(total, launch);
  start(blocks_kernel<kPower, T>, total * kWarp, launch, x, count, row_length, per_row, total, parts.get(), nonfinite);
  start(rows_kernel<kPower == kMaximum, Out>, rows, launch, parts.get(), per_row, total, rows, norms);
}

}  // namespace

void norm_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, Power power, void* norms,
                int64_t* nonfinite, Launch launch) {
  clear(nonfinite, sizeof *nonfinite, launch);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    double* sums = static_cast<double*>(norms);
    if (power == kMaximum)
      run<kMaximum>(x, count, row_length, static_cast<Work<T>*>(norms), nonfinite, launch);
    else if (power == kPower1)
      run<kPower1>(x, count, row_length, sums, nonfinite, launch);
    else if (power == kPower2)
      run<kPower2>(x, count, row_length, sums, nonfinite, launch);
    else
      run<kPower4>(x, count, row_length, sums, nonfinite, launch);
  });
}

void moments_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, void* largest, double* squares,
                   int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    // Two passes: each counts, so the counter is cleared between them.
    clear(nonfinite, sizeof *nonfinite, launch);
    run<kMaximum>(x, count, row_length, static_cast<Work<T>*>(largest), nonfinite, launch);
    clear(nonfinite, sizeof *nonfinite, launch);
    run<kPower2>(x, count, row_length, squares, nonfinite, launch);
  });
}

}  // namespace hvc
