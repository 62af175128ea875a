// One bit per element: packing, the fused offer, the fused decode.
#include <algorithm>
#include <memory>
#include <vector>

#include "hvc/kept.h"
#include "hvc/tree.h"
#include "kernels.h"
#include "parallel.h"
#include "superblocks.h"
#include "visit.h"

namespace hvc {
namespace {

template <class T> struct Offer {
  const T* grad;
  const Work<T>* residual;
  Units units;
  const Stream* key;
  int64_t word_offset;
  uint64_t* bits;
  double* unit_sums;
};

struct OfferResult {
  uint64_t head;  // bits of a first word that begins in the range before
  int64_t nonfinite;
};

template <class T> struct Decode {
  const uint64_t *bits, *zeros;
  const float* steps;
  Units units;
  Feedback feedback;
  double decay, scale;
  const Stream* key;
  int64_t word_offset;
  T* grad;
  Work<T>* residual;
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
  const int64_t bytes = o.units.count * int64_t(sizeof(T) + (o.residual ? sizeof(Work<T>) : 0));
  std::vector<OfferResult> results(size_t(std::max(threads, 1)));
  std::vector<int64_t> begins(results.size());
  parallel_for(threads, o.units.total, bytes, [&](int64_t index, int64_t first, int64_t last) {
    begins[size_t(index)] = unit_begin(o.units, first);
    results[size_t(index)] = range(o, first, last);
  });

  int64_t nonfinite = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].head) o.bits[begins[i] / kWordBits] |= results[i].head;
    nonfinite += results[i].nonfinite;
  }
  if (sums) {
    const DefaultRounding rounding;
    add_superblocks(o.units, o.unit_sums, sums);
  }
  return nonfinite;
}

template <class T> void run_decode(const Decode<T>& d, int threads) {
  const auto range = HVC_CHOOSE(decode<T>);
  const int64_t bytes = d.units.count * int64_t(2 * sizeof(T) + (d.residual ? 2 * sizeof(Work<T>) : 0));
  parallel_for(threads, d.units.total, bytes, [&](int64_t, int64_t first, int64_t last) { range(d, first, last); });
}

}  // namespace

void sign_pack(const void* x, Dtype dtype, int64_t count, uint64_t* bits, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(pack<T>);
    parallel_for(
        launch.threads, words_for(count), count * int64_t(sizeof(T)),
        [&](int64_t, int64_t first, int64_t last) { range(static_cast<const T*>(x), count, bits, first, last); });
  });
}

void sign_offer(const void* grad, const void* residual, Dtype dtype, int64_t count, int64_t row_length,
                const Stream* key, int64_t word_offset, uint64_t* bits, double* sums, int64_t* nonfinite,
                Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Offer<T> offer{static_cast<const T*>(grad),
                         static_cast<const Work<T>*>(residual),
                         units_of(count, row_length),
                         key,
                         word_offset,
                         bits,
                         nullptr};
    *nonfinite = run_offer(offer, sums, launch.threads);
  });
}

void sign_offer_all(const SignOffered* tensors, int64_t tensor_count, Dtype dtype, int64_t ranks, const Stream* key,
                    int64_t* nonfinite, Launch launch) {
  std::vector<double> sums;
  for (int64_t i = 0; i < tensor_count; ++i) {
    const SignOffered& t = tensors[i];
    sums.resize(t.steps ? size_t(ceil_div(t.count, t.row_length)) : 0);
    sign_offer(t.grad, t.residual, dtype, t.count, t.row_length, key, t.word_offset, t.bits,
               t.steps ? sums.data() : nullptr, nonfinite + i, launch);
    const DefaultRounding rounding;
    for (int64_t row = 0; row < int64_t(sums.size()); ++row)
      t.steps[row] = step_of(sums[size_t(row)], std::min(t.row_length, t.count - row * t.row_length), ranks);
  }
}

void sign_decode_all(const SignDecoded* tensors, int64_t tensor_count, Dtype dtype, Feedback feedback, double decay,
                     double scale, const Stream* key, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const SignDecoded& t = tensors[i];
      run_decode(Decode<T>{t.bits, t.zeros, t.steps, units_of(t.count, t.row_length), feedback, decay, scale, key,
                           t.word_offset, static_cast<T*>(t.grad), static_cast<Work<T>*>(t.residual),
                           streams(t.count * int64_t(sizeof(T)))},
                 launch.threads);
    }
  });
}

void sign_decode(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length,
                 Feedback feedback, double decay, double scale, const Stream* key, int64_t word_offset, void* grad,
                 void* residual, Launch launch) {
  const SignDecoded tensor{bits, nullptr, steps, count, row_length, word_offset, grad, residual};
  sign_decode_all(&tensor, 1, dtype, feedback, decay, scale, key, launch);
}

void sign_unpack(const uint64_t* bits, const float* steps, Dtype dtype, int64_t count, int64_t row_length, double scale,
                 void* out, Launch launch) {
  sign_decode(bits, steps, dtype, count, row_length, kFeedbackNone, 1, scale, nullptr, 0, out, nullptr, launch);
}

}  // namespace hvc
