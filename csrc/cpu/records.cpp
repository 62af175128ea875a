// Signs with a scale for each block: the fused offer, the fold of all ranks' records, and the fused decode.
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "record_operands.h"
#include "visit.h"

namespace hvc {
namespace {

template <class W> using Fold = RecordFold<W, const uint8_t* const*>;

}  // namespace
}  // namespace hvc

#define HVC_BODY "records_body.h"
#include "foreach_isa.h"

namespace hvc {

void record_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                  uint8_t* records, int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RecordOffer<T> o{
        static_cast<const T*>(grad), static_cast<const Work<T>*>(residual), count, block, rule, records};
    const auto range = HVC_CHOOSE(record_offer<T>);
    const int64_t bytes = count * int64_t(sizeof(T) + (residual ? sizeof(Work<T>) : 0));
    *nonfinite = parallel_sum(launch.threads, ceil_div(count, block), bytes,
                              [&](int64_t first, int64_t last) { return range(o, first, last); });
  });
}

void record_fold(const uint8_t* const* parts, int64_t ranks, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                 const void* kept, void* left, uint8_t* out, Launch launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const Fold<W> o{parts, ranks, count, block, rule, static_cast<const W*>(kept), static_cast<W*>(left), out};
    const auto range = HVC_CHOOSE(record_fold<W>);
    parallel_for(launch.threads, ceil_div(count, block), count * int64_t(4 * sizeof(W)),
                 [&](int64_t first, int64_t last) { range(o, first, last); });
  });
}

void record_decode(const uint8_t* records, const float* scales, Dtype dtype, int64_t count, int64_t block, double scale,
                   void* grad, void* residual, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const RecordDecode<T> o{
        records, scales, count, block, scale, static_cast<T*>(grad), static_cast<Work<T>*>(residual)};
    const auto range = HVC_CHOOSE(record_decode<T>);
    parallel_for(launch.threads, ceil_div(count, block), count * int64_t(2 * sizeof(T) + 2 * sizeof(Work<T>)),
                 [&](int64_t first, int64_t last) { range(o, first, last); });
  });
}

}  // namespace hvc
