// The norm of every block of a gradient, and how many values are not finite, in one pass.
#ifndef HVC_WIDTH
#include "rules/norm.h"

#include <memory>

#include "rules/tree.h"
#include "kernels.h"
#include "parallel.h"
#include "superblocks.h"
#include "visit.h"

#define HVC_BODY "norm.cpp"
#include "foreach_isa.h"

namespace hvc {
namespace {

// Units of a row in index order: a maximum, or a sum as rules/tree.h says.
template <class Out> void join(const Units& units, const double* parts, bool maximum, Out* out) {
  for (int64_t first = 0; first < units.total; first += units.per_row) {
    const int64_t end = std::min(first + units.per_row, units.total);
    double value = parts[first];
    for (int64_t unit = first + 1; unit < end; ++unit)
      value = maximum ? std::max(value, parts[unit]) : value + parts[unit];
    out[first / units.per_row] = Out(value);
  }
}

template <Power kPower, class T> int64_t run(const T* x, const Units& units, void* out, int threads) {
  const std::unique_ptr<double[]> parts(new double[size_t(units.total)]);
  const auto range = HVC_CHOOSE(norms<kPower, T>);
  const int64_t nonfinite =
      parallel_sum(threads, units.total, units.count * int64_t(sizeof(T)),
                   [&](int64_t first, int64_t last) { return range(x, units, parts.get(), first, last); });
  if (kPower == kMaximum)
    join(units, parts.get(), true, static_cast<Work<T>*>(out));
  else
    join(units, parts.get(), false, static_cast<double*>(out));
  return nonfinite;
}

}  // namespace

void norm_offer(const NormOffered* tensors, int64_t tensor_count, Dtype dtype, Power power, int64_t* nonfinite,
                Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run_power = power == kMaximum  ? run<kMaximum, T>
                           : power == kPower1 ? run<kPower1, T>
                           : power == kPower2 ? run<kPower2, T>
                                              : run<kPower4, T>;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const NormOffered& t = tensors[i];
      nonfinite[i] = run_power(static_cast<const T*>(t.grad), units_of(t.count, t.row_length), t.norms, launch.threads);
    }
  });
}

void moments_offer(const MomentsOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                   Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(moments<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const MomentsOffered& t = tensors[i];
      const Units units = units_of(t.count, t.row_length);
      const std::unique_ptr<double[]> parts(new double[size_t(2 * units.total)]);
      nonfinite[i] =
          parallel_sum(launch.threads, units.total, t.count * int64_t(sizeof(T)), [&](int64_t first, int64_t last) {
            return range(static_cast<const T*>(t.grad), units, parts.get(), first, last);
          });
      join(units, parts.get(), true, static_cast<Work<T>*>(t.largest));
      join(units, parts.get() + units.total, false, t.squares);
    }
  });
}

}  // namespace hvc

#else  // compiled once per instruction set: the loops over elements

#include "norm_lanes.h"

template <Power kPower, bool kLargest, class T, class W>
HVC_INLINE double sum_unit(const T* x, const Units& units, int64_t unit, Lanes<W>& largest, int64_t& nonfinite) {
  const int64_t end = unit_begin(units, unit + 1);
  double sum = 0;
  for (int64_t block = unit_begin(units, unit); block < end; block += kBlock)
    sum += sum_block<kPower, kLargest>(x + block, std::min(kBlock, end - block), largest, nonfinite);
  return sum;
}

template <class T> HVC_INLINE double largest_in_unit(const T* x, const Units& units, int64_t unit, int64_t& nonfinite) {
  const int64_t end = unit_begin(units, unit + 1);
  Bits<T> largest = 0;
  for (int64_t block = unit_begin(units, unit); block < end; block += kBlock)
    count_block(x + block, std::min(kBlock, end - block), largest, nonfinite);
  return double(to_work(bit_cast<T>(largest)));
}

template <Power kPower, class T>
int64_t norms(const T* x, const Units& units, double* out, int64_t first, int64_t last) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  [[maybe_unused]] Lanes<W> unused;
  for (int64_t unit = first; unit < last; ++unit) {
    if constexpr (kPower == kMaximum)
      out[unit] = largest_in_unit(x, units, unit, nonfinite);
    else
      out[unit] = sum_unit<kPower, false>(x, units, unit, unused, nonfinite);
  }
  return nonfinite;
}

// Both of each unit: the largest |x|, then the sum of squares.
template <class T> int64_t moments(const T* x, const Units& units, double* out, int64_t first, int64_t last) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  for (int64_t unit = first; unit < last; ++unit) {
    Lanes<W> largest = broadcast(W(0));
    out[units.total + unit] = sum_unit<kPower2, true>(x, units, unit, largest, nonfinite);
    out[unit] = double(largest_of(largest));
  }
  return nonfinite;
}

#endif
