// Signs with two values per row: the fused offer, and the fused decode of all ranks.
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

template <class T> struct TwoValueOffer {
  const T* grad;
  const void* residual;
  bool short_kept;
  Units units;
  uint64_t* bits;
  double *unit_highs, *unit_lows;
  int64_t* unit_ones;
};

template <class T> struct TwoValueDecode {
  const uint64_t* const* bits;
  const float* const* highs;
  const float* const* lows;  // or none
  int64_t ranks, own;
  Units units;
  double scale;
  T* grad;
  void* residual;
  bool short_kept;
  int64_t first;  // the number of the first element in the bucket
  KeptDraws draws;
};

}  // namespace
}  // namespace hvc

#define HVC_BODY "two_value_body.h"
#include "foreach_isa.h"

namespace hvc {
namespace {

template <class T> int64_t run_offer(const TwoValueOffer<T>& o, int threads) {
  const auto range = HVC_CHOOSE(two_value_offer<T>);
  const int64_t bytes = o.units.count * int64_t(sizeof(T) + (o.residual ? sizeof(Work<T>) : 0));
  return offer_units(o.units, o.bits, bytes, threads,
                     [&](int64_t first, int64_t last) { return range(o, first, last); });
}

void add_ones(const Units& units, const int64_t* unit_ones, int64_t* ones) {
  for (int64_t unit = 0; unit < units.total; ++unit) {
    int64_t& sum = ones[unit / units.per_row];
    sum = unit % units.per_row == 0 ? unit_ones[unit] : sum + unit_ones[unit];
  }
}

}  // namespace

void two_value_offer(const TwoValueOffered* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                     int64_t* nonfinite, Launch launch) {
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < tensor_count; ++i) {
      const TwoValueOffered& t = tensors[i];
      const Units units = units_of(t.count, t.row_length);
      const std::unique_ptr<double[]> sums(new double[size_t(2 * units.total)]);
      const std::unique_ptr<int64_t[]> counts(new int64_t[size_t(units.total)]);
      double *unit_highs = sums.get(), *unit_lows = sums.get() + units.total;
      const TwoValueOffer<T> offer{static_cast<const T*>(t.grad),
                                   t.residual,
                                   kept_dtype == kBFloat16,
                                   units,
                                   t.bits,
                                   unit_highs,
                                   unit_lows,
                                   counts.get()};
      nonfinite[i] = run_offer(offer, launch.threads);
      add_superblocks(units, unit_highs, t.highs);
      add_superblocks(units, unit_lows, t.lows);
      add_ones(units, counts.get(), t.ones);
    }
  });
}

void two_value_decode(const TwoValueDecoded* tensors, int64_t tensor_count, Dtype dtype, Dtype kept_dtype,
                      const uint64_t* const* bits, const float* const* highs, const float* const* lows, int64_t ranks,
                      int64_t own, double scale, const Stream* rounding, Launch launch) {
  const KeptDraws draws = draws_for(rounding ? *rounding : Stream{});
  const auto number = size_t(ranks);
  std::vector<const uint64_t*> bits_of(number);
  std::vector<const float*> highs_of(number), lows_of(number);
  visit(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto range = HVC_CHOOSE(two_value_decode<T>);
    for (int64_t i = 0; i < tensor_count; ++i) {
      const TwoValueDecoded& t = tensors[i];
      for (size_t rank = 0; rank < number; ++rank) {
        bits_of[rank] = bits[rank] + t.first_word;
        highs_of[rank] = highs[rank] + t.first_row;
        if (lows) lows_of[rank] = lows[rank] + t.first_row;
      }
      const TwoValueDecode<T> decode{bits_of.data(),
                                     highs_of.data(),
                                     lows ? lows_of.data() : nullptr,
                                     ranks,
                                     own,
                                     units_of(t.count, t.row_length),
                                     scale,
                                     static_cast<T*>(t.grad),
                                     t.residual,
                                     kept_dtype == kBFloat16,
                                     t.first_word * kWordBits,
                                     draws};
      const int64_t bytes = t.count * int64_t(2 * sizeof(T) + 2 * sizeof(Work<T>));
      parallel_for(launch.threads, decode.units.total, bytes,
                   [&](int64_t first, int64_t last) { range(decode, first, last); });
    }
  });
}

}  // namespace hvc
