// The norm of every block of a gradient, and how many values are not finite, in one pass.
#include "rules/norm.h"
#include "rows.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Offered {
  const T* grad;
  int64_t count, row_length;
};

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

// A warp takes a block of 1024 elements of a row, lane by lane as rules/tree.h says; a maximum needs no order.
template <Power kPower, bool kLargest, class T, class Table>
__global__ void blocks_kernel(const __grid_constant__ Table table, Found found) {
  for (int64_t unit = first_warp(); unit < table.units(); unit += warp_stride()) {
    const int item = table.item_of(unit);
    const Offered<T>& o = table.items[item];
    const auto [row, begin, end] = block_of_row(unit - table.begins[item], o.count, o.row_length);
    double largest = 0, sum = 0;
    int64_t bad = 0;
#pragma unroll kInFlight
    for (int64_t i = begin + lane_index(); i < end; i += kWarp) {
      const T value = o.grad[i];
      const bool finite = is_finite(value);
      bad += !finite;
      if (kPower != kMaximum) sum += power_of<kPower>(double(to_work(value)));
      if (kLargest && finite) largest = max(largest, double(to_work(bit_cast<T>(magnitude_bits(value)))));
    }
    if (kPower != kMaximum) sum = combine_warp(sum);
    if (kLargest) largest = largest_of_warp(largest);
    add_count(found.nonfinite + item, bad);
    if (lane_index() != 0) continue;
    if (kPower != kMaximum) found.sums[unit] = sum;
    if (kLargest) found.largest[unit] = largest;
  }
}

// ---- launchers --------------------------------------------------------------------------------------------

// One pass for the largest |x| and for the sum of a power, or for one of them: `tensor` says where of each.
template <Power kPower, bool kLargest, class T, class TensorOf>
void run(int64_t tensor_count, TensorOf tensor, int64_t* nonfinite, Launch launch) {
  clear_counts(nonfinite, tensor_count, launch);
  const auto units = [&](int64_t i) { return units_of(tensor(i).count, tensor(i).row_length); };
  const auto blocks = [&](int64_t i) { return blocks_of(tensor(i).count, tensor(i).row_length).total; };
  std::vector<int64_t> first_block(size_t(tensor_count) + 1);
  for (int64_t i = 0; i < tensor_count; ++i) first_block[size_t(i) + 1] = first_block[size_t(i)] + blocks(i);
  const Scratch<double> largest(kLargest ? first_block.back() : 0, launch);
  const Scratch<double> sums(kPower != kMaximum ? first_block.back() : 0, launch);
  const auto item = [&](int64_t i) {
    return Offered<T>{static_cast<const T*>(tensor(i).grad), tensor(i).count, tensor(i).row_length};
  };
  in_tables<Offered<T>>(tensor_count, item, blocks, [&](const auto& table, int64_t first) {
    const int64_t at = first_block[size_t(first)];
    const Found found{kLargest ? largest.get() + at : nullptr, kPower != kMaximum ? sums.get() + at : nullptr,
                      nonfinite + first};
    start(blocks_kernel<kPower, kLargest, T, std::decay_t<decltype(table)>>, table.units() * kWarp, launch, table,
          found);
  });
  const auto begin = [&](int64_t i) { return first_block[size_t(i)]; };
  using Largest = Plain<Work<T>>;
  using Sum = Plain<double>;
  if (kLargest)
    add_blocks<true, Largest>(
        tensor_count, units, largest.get(), begin,
        [&](int64_t i) { return Largest{static_cast<Work<T>*>(tensor(i).largest)}; }, launch);
  if (kPower != kMaximum)
    add_blocks<false, Sum>(
        tensor_count, units, sums.get(), begin, [&](int64_t i) { return Sum{tensor(i).squares}; }, launch);
}

}  // namespace

void norm_offer(const NormOffered* tensors, int64_t tensor_count, Dtype dtype, Power power, int64_t* nonfinite,
                Launch launch) {
  // Norms are the one or the other of two moments.
  const auto tensor = [&](int64_t i) {
    const NormOffered& t = tensors[i];
    return MomentsOffered{t.grad, t.count, t.row_length, t.norms, static_cast<double*>(t.norms)};
  };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (power == kMaximum)
      run<kMaximum, true, T>(tensor_count, tensor, nonfinite, launch);
    else if (power == kPower1)
      run<kPower1, false, T>(tensor_count, tensor, nonfinite, launch);
    else if (power == kPower2)
      run<kPower2, false, T>(tensor_count, tensor, nonfinite, launch);
    else
      run<kPower4, false, T>(tensor_count, tensor, nonfinite, launch);
  });
}

void moments_offer(const MomentsOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                   Launch launch) {
  const auto tensor = [&](int64_t i) { return tensors[i]; };
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    run<kPower2, true, T>(tensor_count, tensor, nonfinite, launch);
  });
}

}  // namespace hvc
