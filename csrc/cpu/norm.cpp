// The norm of every block of a gradient, and how many values are not finite, in one pass.
#include "hvc/norm.h"

#include <atomic>
#include <memory>

#include "hvc/tree.h"
#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "norm_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

// Units of a row in index order: a maximum, or a sum as hvc/tree.h says.
template <class Out> void join(const Units& units, const double* parts, bool maximum, Out* out) {
  const DefaultRounding rounding;
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
  std::atomic<int64_t> nonfinite{0};
  parallel_for(threads, units.total, units.count * int64_t(sizeof(T)),
               [&](int64_t, int64_t first, int64_t last) { nonfinite += range(x, units, parts.get(), first, last); });
  if (kPower == kMaximum)
    join(units, parts.get(), true, static_cast<Work<T>*>(out));
  else
    join(units, parts.get(), false, static_cast<double*>(out));
  return nonfinite;
}

}  // namespace

void norm_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, Power power, void* norms,
                int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    const Units units = units_of(count, row_length);
    *nonfinite = power == kMaximum  ? run<kMaximum>(x, units, norms, launch.threads)
                 : power == kPower1 ? run<kPower1>(x, units, norms, launch.threads)
                 : power == kPower2 ? run<kPower2>(x, units, norms, launch.threads)
                                    : run<kPower4>(x, units, norms, launch.threads);
  });
}

void moments_offer(const void* grad, Dtype dtype, int64_t count, int64_t row_length, void* largest, double* squares,
                   int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* x = static_cast<const T*>(grad);
    const Units units = units_of(count, row_length);
    const std::unique_ptr<double[]> parts(new double[size_t(2 * units.total)]);
    const auto range = HVC_CHOOSE(moments<T>);
    std::atomic<int64_t> bad{0};
    parallel_for(launch.threads, units.total, count * int64_t(sizeof(T)),
                 [&](int64_t, int64_t first, int64_t last) { bad += range(x, units, parts.get(), first, last); });
    join(units, parts.get(), true, static_cast<Work<T>*>(largest));
    join(units, parts.get() + units.total, false, squares);
    *nonfinite = bad;
  });
}

void norm_offer_all(const NormOffered* tensors, int64_t tensor_count, Dtype dtype, Power power, int64_t* nonfinite,
                    Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const NormOffered& t = tensors[i];
    norm_offer(t.grad, dtype, t.count, t.row_length, power, t.norms, nonfinite + i, launch);
  }
}

void moments_offer_all(const MomentsOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t* nonfinite,
                       Launch launch) {
  for (int64_t i = 0; i < tensor_count; ++i) {
    const MomentsOffered& t = tensors[i];
    moments_offer(t.grad, dtype, t.count, t.row_length, t.largest, t.squares, nonfinite + i, launch);
  }
}

}  // namespace hvc
