// Rows of elements on CUDA: the tree of hvc/tree.h in blocks that warps sum, and bits that warps vote on.
#pragma once
#include "hvc/tree.h"
#include "launch.h"

namespace hvc {
namespace {

template <class T> __device__ Work<T> offered(const T* grad, const Work<T>* residual, int64_t i) {
  const Work<T> x = to_work(grad[i]);
  return residual ? x + residual[i] : x;
}

// Divisions of 64 bits are slow, and most tensors need none.
__device__ inline int64_t row_of(int64_t i, int64_t row_length, int64_t count) {
  if (row_length >= count) return 0;
  return count <= 0xffffffff ? int64_t(uint32_t(i) / uint32_t(row_length)) : i / row_length;
}

// Blocks of all rows, in order; hvc/tree.h says what a block is.
struct Blocks {
  int64_t per_row, total;
};
__host__ __device__ inline Blocks blocks_of(int64_t count, int64_t row_length) {
  const int64_t per_row = ceil_div(row_length, kBlock);
  return {per_row, count / row_length * per_row + ceil_div(count % row_length, kBlock)};
}

// A warp's part of consecutive elements: lane by lane, as the sums and the votes want them, with this many loads of
// each lane under way. Loads of 16 bytes would put neighbours into one lane, and need an alignment that gradients lack.
constexpr int kInFlight = 4;

template <class T> struct Loaded {
  Work<T> x[kInFlight];  // 0 behind the end
};
template <class T>
__device__ Loaded<T> load_groups(const T* grad, const Work<T>* residual, int64_t begin, int64_t end) {
  Loaded<T> loaded;
  T x[kInFlight];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int64_t i = begin + k * kWarp + lane_index();
    x[k] = i < end ? grad[i] : T{};
    loaded.x[k] = residual && i < end ? residual[i] : Work<T>(0);
  }
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const bool inside = begin + k * kWarp + lane_index() < end;
    const Work<T> mine = to_work(x[k]);
    loaded.x[k] = !inside ? Work<T>(0) : residual ? mine + loaded.x[k] : mine;
  }
  return loaded;
}

// Writes 32 bits from element `begin` on, in cleared memory where rows do not begin at a multiple of 32.
__device__ inline void put_bits(uint32_t* halves, int64_t begin, uint32_t bits, bool whole_halves) {
  const int shift = int(begin % kWarp);
  if (whole_halves) {
    halves[begin / kWarp] = bits;
    return;
  }
  atomicOr(halves + begin / kWarp, bits << shift);
  if (shift != 0 && bits >> (kWarp - shift) != 0) atomicOr(halves + begin / kWarp + 1, bits >> (kWarp - shift));
}

template <class W> __device__ W combine_warp(W lane) {
  for (int half = kWarp / 2; half > 0; half /= 2) lane += __shfl_down_sync(kAllLanes, lane, half);
  return lane;
}

// A warp adds values in index order, from 0, or finds the largest: 32 are loaded at once, every lane gets the result.
template <bool kLargest> __device__ double in_order(const double* values, int64_t begin, int64_t end) {
  double total = 0;
  for (int64_t first = begin; first < end; first += kWarp) {
    const double mine = first + lane_index() < end ? values[first + lane_index()] : 0.0;
#pragma unroll
    for (int lane = 0; lane < kWarp; ++lane) {
      const double value = __shfl_sync(kAllLanes, mine, lane);
      total = kLargest ? max(total, value) : total + value;
    }
  }
  return total;
}

template <bool kLargest> __global__ void units_kernel(Units units, const double* of_blocks, double* of_units) {
  const Blocks blocks = blocks_of(units.count, units.row_length);
  constexpr int64_t kBlocks = kSuperblock / kBlock;
  for (int64_t unit = first_warp(); unit < units.total; unit += warp_stride()) {
    const int64_t row = unit / units.per_row * blocks.per_row, begin = row + unit % units.per_row * kBlocks;
    const int64_t end = min(min(begin + kBlocks, row + blocks.per_row), blocks.total);
    const double found = in_order<kLargest>(of_blocks, begin, end);
    if (lane_index() == 0) of_units[unit] = found;
  }
}

template <bool kLargest, class Out> __global__ void rows_kernel(Units units, const double* of_units, Out* out) {
  const int64_t rows = ceil_div(units.count, units.row_length);
  for (int64_t row = first_warp(); row < rows; row += warp_stride()) {
    const int64_t begin = row * units.per_row, end = min(begin + units.per_row, units.total);
    const double found = in_order<kLargest>(of_units, begin, end);
    if (lane_index() == 0) out[row] = Out(canonical(found));
  }
}

// Sums of rows, or the largest, from those of their blocks, in the order of the tree.
template <bool kLargest = false, class Out>
void add_blocks(const Units& units, const double* of_blocks, Out* out, Launch launch) {
  const Scratch<double> of_units(units.total, launch);
  start(units_kernel<kLargest>, units.total * kWarp, launch, units, of_blocks, of_units.get());
  const int64_t rows = ceil_div(units.count, units.row_length);
  start(rows_kernel<kLargest, Out>, rows * kWarp, launch, units, of_units.get(), out);
}

}  // namespace
}  // namespace hvc
