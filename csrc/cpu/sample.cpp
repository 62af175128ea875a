// Samples that all ranks draw alike: offered and decoded.
#include "rules/sample.h"

#include "kernels.h"
#include "parallel.h"
#include "visit.h"

#define HVC_BODY "sample_body.h"
#include "foreach_isa.h"

namespace hvc {

void sample_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, int64_t k,
                  const Stream* key, int64_t first, void* values, int64_t* nonfinite, Launch launch) {
  *nonfinite = 0;
  const Sampling s{count, k, *key, first, block};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = block == 1 ? HVC_CHOOSE(offer_sample<T>) : HVC_CHOOSE(offer_blocks<T>);
    const int64_t bytes = count * int64_t(sizeof(T) + (residual ? sizeof(W) : 0));
    if (k == 0) return;
    *nonfinite = parallel_sum(launch.threads, k, bytes, [&](int64_t begin, int64_t end) {
      return range(s, static_cast<const T*>(grad), static_cast<const W*>(residual), static_cast<W*>(values), begin,
                   end);
    });
  });
}

void sample_decode(const void* values, Dtype dtype, int64_t count, int64_t block, int64_t k, const Stream* key,
                   int64_t first, double scale, bool weighted, void* grad, void* residual, Launch launch) {
  const Sampling s{count, k, *key, first, block};
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using W = Work<T>;
    const auto range = block == 1 ? HVC_CHOOSE(decode_sample<T>) : HVC_CHOOSE(decode_blocks<T>);
    const int64_t bytes = 2 * count * int64_t(sizeof(T) + (residual ? sizeof(W) : 0));
    if (k == 0) return;
    parallel_for(launch.threads, k, bytes, [&](int64_t begin, int64_t end) {
      range(s, static_cast<const W*>(values), W(scale), weighted, static_cast<T*>(grad), static_cast<W*>(residual),
            streams(count * int64_t(sizeof(T))), begin, end);
    });
  });
}

}  // namespace hvc
