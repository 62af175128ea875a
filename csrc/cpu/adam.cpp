// Adam's step by a second moment that is held: what its own formula is to find, and all of it.
#include "rules/adam.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "adam_body.h"
#include "foreach_isa.h"

namespace hvc {

namespace {

// Calls range(first, last, floor) for parts of a tensor's rows, on several threads.
template <class W, class Tensor, class Range>
void each_part(const Tensor& t, int64_t bytes, Launch launch, const Range& range) {
  const auto* floors = static_cast<const W*>(t.floors);
  parallel_for(launch.threads, t.count, t.count * bytes, [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t row = first / t.row_length, end = std::min(last, (row + 1) * t.row_length);
      range(first, end, floors ? floors[row] : W(0));
      first = end;
    }
  });
}

}  // namespace

void adam_hold(const AdamHeld* tensors, int64_t tensor_count, Dtype dtype, AdamScales<double> scales, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = HVC_CHOOSE(adam_hold<T>);
    const AdamScales<W> s{W(scales.share), W(scales.least), W(scales.wanted), W(scales.coming), W(scales.taken)};
    for (int64_t i = 0; i < tensor_count; ++i) {
      const AdamHeld& t = tensors[i];
      const bool streamed = streams(t.count * int64_t(sizeof(T)));
      each_part<W>(t, 3 * sizeof(T) + sizeof(W), launch, [&](int64_t first, int64_t last, W floor) {
        range(static_cast<T*>(t.second), static_cast<const T*>(t.first), static_cast<const T*>(t.grad),
              static_cast<const W*>(t.square), floor, s, streamed, first, last);
      });
    }
  });
}

void adam_step(const AdamStepped* tensors, int64_t tensor_count, Dtype dtype, AdamStep<double> step, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = HVC_CHOOSE(adam_step<T>);
    const auto s = step.as<W>();
    for (int64_t i = 0; i < tensor_count; ++i) {
      const AdamStepped& t = tensors[i];
      each_part<W>(t, 5 * sizeof(T) + sizeof(W), launch, [&](int64_t first, int64_t last, W floor) {
        range(static_cast<T*>(t.weight), static_cast<T*>(t.first), static_cast<const T*>(t.grad),
              static_cast<const W*>(t.square), floor, s, first, last);
      });
    }
  });
}

}  // namespace hvc
