// SGD's step.
#include "rules/sgd.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "sgd_body.h"
#include "foreach_isa.h"

namespace hvc {

void sgd_step(const SgdStepped* tensors, int64_t tensor_count, Dtype dtype, SgdStep<double> step, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(sgd_step<T>);
    const auto s = step.as<Work<T>>();
    for (int64_t i = 0; i < tensor_count; ++i) {
      const SgdStepped& t = tensors[i];
      const int64_t bytes = t.count * int64_t(sizeof(T)) * (t.buffer ? 5 : 3);
      parallel_for(launch.threads, t.count, bytes, [&](int64_t first, int64_t last) {
        range(static_cast<T*>(t.weight), static_cast<T*>(t.buffer), static_cast<const T*>(t.grad), s, first, last);
      });
    }
  });
}

}  // namespace hvc
