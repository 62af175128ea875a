// One bit per element: packing, the fused offer, the fused decode.
#include <algorithm>
#include <memory>
#include <vector>

#include "rules/kept.h"
#include "rules/tree.h"
#include "kernels.h"
#include "parallel.h"
#include "superblocks.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Offer {
  const T* grad;
  const void* residual;
  bool short_kept;
  const Work<T>* divisor;
  Units units;
  const Stream* key;
  int64_t word_offset;
  uint64_t* bits;
  double* unit_sums;
};

template <class T> struct Decode {
  const uint64_t *bits, *zeros;
  const float* steps;
  const Work<T>* divisor;
  Units units;
  Feedback feedback;
  double decay, scale;
  const Stream* key;
  int64_t word_offset;
  T* grad;
  void* residual;
  bool short_kept;
  KeptDraws draws;
  bool stream;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "sign_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

template <class T> int64_t run_offer(Offer<T> o, double* sums, int threads) {
  std::unique_ptr<double[]> partial;
  if (sums && o.units.per_row > 1) partial.reset(new double[size_t(o.units.total)]);
  o.unit_sums = partial ? partial.get() : sums;

  const auto range = HVC_CHOOSE(offer<T>);
  const int64_t bytes =
      o.units.count * int64_t(sizeof(T) + (o.residual ? sizeof(Work<T>) : 0) + (o.divisor ? sizeof(Work<T>) : 0));
  const int64_t nonfinite =
      offer_units(o.units, o.bits, bytes, threads, [&](int64_t first, int64_t last) { return range(o, first, last); });
  if (sums) add_superblocks(o.units, o.unit_sums, sums);
  return nonfinite;
}

void steps_of_rows(const SignOffered& t, const double* sums, int64_t ranks, float scale) {
  for (int64_t begin = 0, row = 0; begin < t.count; begin += t.row_length, ++row)
    t.steps[row] = step_of(sums[row], std::min(t.row_length, t.count - begin), ranks, scale);
}

template <class T> void run_decode(const Decode<T>& d, int threads) {
  const auto range = HVC_CHOOSE(decode<T>);
  const int64_t bytes = d.units.count * int64_t(2 * sizeof(T) + (d.residual ? 2 * sizeof(Work<T>) : 0) +
                                                (d.divisor ? sizeof(Work<T>) : 0));
  parallel_for(threads, d.units.total, bytes, [&](int64_t first, int64_t last) { range(d, first, last); });
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(pack<T>);
    parallel_for(launch.threads, words_for(count), count * int64_t(sizeof(T)),
                 [&](int64_t first, int64_t last) { range(static_cast<const T*>(x), count, bits, first, last); });
  });
}

void sign_offer(const SignOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, int64_t ranks,
                float scale, const Stream* key, int64_t* nonfinite, Launch launch) {
  std::vector<double> room;
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const SignOffered& t = tensors[i];
      const Offer<T> offer{static_cast<const T*>(t.grad),
                           t.residual,
                           kept_dtype == kBFloat16,
                           static_cast<const Work<T>*>(t.divisor),
                           units_of(t.count, t.row_length),
                           key,
                           t.word_offset,
                           t.bits,
                           nullptr};
      if (t.steps && !t.sums) room.resize(size_t(ceil_div(t.count, t.row_length)));
      double* sums = t.steps && !t.sums ? room.data() : t.sums;
      nonfinite[i] = run_offer(offer, sums, launch.threads);
      if (t.steps) steps_of_rows(t, sums, ranks, scale);
    }
  });
}

void sign_decode(const SignDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype, Feedback feedback,
                 double decay, double scale, const Stream* key, const Stream* rounding, Launch launch) {
  const KeptDraws draws = draws_for(rounding ? *rounding : Stream{});
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const SignDecoded& t = tensors[i];
      const Decode<T> decode{t.bits,
                             t.zeros,
                             t.steps,
                             static_cast<const Work<T>*>(t.divisor),
                             units_of(t.count, t.row_length),
                             feedback,
                             decay,
                             scale,
                             key,
                             t.word_offset,
                             static_cast<T*>(t.grad),
                             t.residual,
                             kept_dtype == kBFloat16,
                             draws,
                             streams(t.count * int64_t(sizeof(T)))};
      run_decode(decode, launch.threads);
    }
  });
}

}  // namespace hvc
