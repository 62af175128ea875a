// Signs with a scale for each block: the fused offer, the fold of all ranks' records, and the fused decode.
#include <cmath>
#include <vector>

#include "rules/record.h"
#include "kernels.h"
#include "parallel.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct RecordOffer {
  const T* grad;
  const Work<T>* residual;
  int64_t count, block;
  ScaleRule rule;
  uint8_t* records;
};

template <class W> struct RecordFold {
  const uint8_t* const* parts;
  int64_t ranks, count, block;
  ScaleRule rule;
  const W* kept;
  W* left;
  uint8_t* out;  // may be one of the parts
};

template <class T> struct RecordDecode {
  const uint8_t* records;
  const float* scales;  // this rank's own
  int64_t count, block;
  double scale;
  T* grad;
  Work<T>* residual;
};

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
    std::vector<int64_t> counts(size_t(std::max(launch.threads, 1)));
    const int64_t bytes = count * int64_t(sizeof(T) + (residual ? sizeof(Work<T>) : 0));
    parallel_for(launch.threads, ceil_div(count, block), bytes,
                 [&](int64_t index, int64_t first, int64_t last) { counts[size_t(index)] = range(o, first, last); });
    *nonfinite = 0;
    for (const int64_t found : counts) *nonfinite += found;
  });
}

void record_fold(const uint8_t* const* parts, int64_t ranks, Dtype dtype, int64_t count, int64_t block, ScaleRule rule,
                 const void* kept, void* left, uint8_t* out, Launch launch) {
  visit_work(dtype, [&](auto type) {
    using W = typename decltype(type)::type;
    const RecordFold<W> o{parts, ranks, count, block, rule, static_cast<const W*>(kept), static_cast<W*>(left), out};
    const auto range = HVC_CHOOSE(record_fold<W>);
    parallel_for(launch.threads, ceil_div(count, block), count * int64_t(4 * sizeof(W)),
                 [&](int64_t, int64_t first, int64_t last) { range(o, first, last); });
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
                 [&](int64_t, int64_t first, int64_t last) { range(o, first, last); });
  });
}

}  // namespace hvc
