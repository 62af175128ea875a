// Counters whose norm is about that of a gradient, see rules/norm_sketch.h.
#include "rules/norm_sketch.h"

#include <memory>

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "norm_sketch_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

template <class T> void sketch(const NormSketched& t, int places, const Stream& key, int threads) {
  const int64_t counters = int64_t(places) * kSketchBlock, units = norm_units(t.count);
  const std::unique_ptr<Work<T>[]> parts(new Work<T>[size_t(units * counters)]);
  const auto unit = HVC_CHOOSE(sketch_unit<T>);
  parallel_for(threads, units, t.count * int64_t(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * kNormUnit * kSketchBlock, count = std::min(kNormUnit * kSketchBlock, t.count - begin);
      unit(static_cast<const T*>(t.grad) + begin, count, (t.offset + begin) / kSketchBlock, places, key,
           parts.get() + i * counters);
    }
  });
  for (int64_t counter = 0; counter < counters; ++counter) {
    double sum = 0;
    for (int64_t i = 0; i < units; ++i) sum += double(parts[size_t(i * counters + counter)]);
    t.sums[counter] = canonical(sum);
  }
}

}  // namespace

void norm_sketch(const NormSketched* tensors, int64_t tensor_count, Dtype dtype, int places, const Stream* key,
                 Launch launch) {
  visit(dtype, [&](auto type) {
    for (int64_t i = 0; i < tensor_count; ++i)
      sketch<typename decltype(type)::type>(tensors[i], places, *key, launch.threads);
  });
}

}  // namespace hvc
