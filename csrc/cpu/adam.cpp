// Adam's second moment as its own step is to find it.
#include "rules/adam.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "adam_body.h"
#include "foreach_isa.h"

namespace hvc {

void adam_hold(const AdamHeld* tensors, int64_t tensor_count, Dtype dtype, AdamScales<double> scales, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = HVC_CHOOSE(adam_hold<T>);
    const AdamScales<W> s{W(scales.share), W(scales.least), W(scales.wanted), W(scales.coming), W(scales.taken)};
    for (int64_t i = 0; i < tensor_count; ++i) {
      const AdamHeld& t = tensors[i];
      const auto* floors = static_cast<const W*>(t.floors);
      const bool streamed = streams(t.count * int64_t(sizeof(T)));
      const auto rows = [&](int64_t first, int64_t last) {
        while (first < last) {
          const int64_t row = first / t.row_length, end = std::min(last, (row + 1) * t.row_length);
          range(static_cast<T*>(t.second), static_cast<const T*>(t.first), static_cast<const T*>(t.grad),
                static_cast<const W*>(t.square), floors ? floors[row] : W(0), s, streamed, first, end);
          first = end;
        }
      };
      parallel_for(launch.threads, t.count, t.count * int64_t(3 * sizeof(T) + sizeof(W)), rows);
    }
  });
}

}  // namespace hvc
