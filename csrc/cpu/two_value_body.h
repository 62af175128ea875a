// Signs with two values, 32 elements at a time. Compiled once per instruction set; see foreach_isa.h.

#include "bit_lanes.h"

// What one row's elements add up to: sums of |x| of both sides, lane by lane, and how many are on the high one.
template <class W> struct Sides {
  Lanes<W> highs, lows;
  int64_t ones, nonfinite;
};

template <class T, class R> HVC_INLINE void two_value_offer_group(const T* grad, const R* residual, int count,
                                                                  BitWriter& writer, Sides<Work<T>>& sides) {
  using W = Work<T>;
  const Lanes<W> x = offered(grad, residual, count), size = magnitude(x), zero = broadcast(W(0));
  const Mask<W> high = sign_bit(x);  // absent lanes have no size
  const uint32_t valid = valid_lanes(count), ones = high & valid;
  sides.highs = sides.highs + select(high, size, zero);
  sides.lows = sides.lows + select(high, zero, size);
  sides.ones += __builtin_popcount(ones);
  sides.nonfinite += __builtin_popcount(~can_be_kept(x) & valid);
  writer.put(ones, 0, count);
}

// R is the type of the residual, or void where there is none.
template <class R, class T> HVC_INLINE void two_value_offer_block(const TwoValueOffer<T>& o, int64_t begin, int64_t end,
                                                                  BitWriter& writer, Sides<Work<T>>& sides) {
  sides.highs = sides.lows = broadcast(Work<T>(0));
  const auto* residual = kept_at<R, Work<T>>(o.residual);
  const auto group = [&](int64_t i, int count) __attribute__((always_inline)) {
    two_value_offer_group(o.grad + i, residual ? residual + i : nullptr, count, writer, sides);
  };
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) group(i, kLanes);
  if (i < end) group(i, rest_of(end - i));
}

template <class R, class T> OfferResult two_value_offer_units(const TwoValueOffer<T>& o, int64_t first, int64_t last) {
  BitWriter writer(o.bits, unit_begin(o.units, first), nullptr);  // no zero asks for a coin
  Sides<Work<T>> sides{};
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(o.units, unit), end = unit_begin(o.units, unit + 1);
    double high = 0, low = 0;
    sides.ones = 0;
    for (int64_t block = begin; block < end; block += kBlock) {
      two_value_offer_block<R>(o, block, std::min(block + kBlock, end), writer, sides);
      high += double(combine(sides.highs));
      low += double(combine(sides.lows));
    }
    o.unit_highs[unit] = high;
    o.unit_lows[unit] = low;
    o.unit_ones[unit] = sides.ones;
  }
  return {writer.finish(), sides.nonfinite};
}

template <class T> OfferResult two_value_offer(const TwoValueOffer<T>& o, int64_t first, int64_t last) {
  if (!o.residual) return two_value_offer_units<void>(o, first, last);
  return o.short_kept ? two_value_offer_units<BFloat16>(o, first, last)
                      : two_value_offer_units<Work<T>>(o, first, last);
}

// What one rank sent for up to 32 elements of a row.
template <class T>
HVC_INLINE Lanes<Work<T>> sent(const TwoValueDecode<T>& d, int64_t rank, int64_t row, int64_t begin, int count) {
  using W = Work<T>;
  const W high = d.highs[rank][row], low = d.lows ? W(d.lows[rank][row]) : -high;
  return select(bits_at(d.bits[rank], begin, count), broadcast(high), broadcast(low));
}

template <class R, class T>
HVC_INLINE void two_value_group(const TwoValueDecode<T>& d, int64_t row, int64_t begin, int count) {
  using W = Work<T>;
  T* grad = d.grad + begin;
  R* residual = static_cast<R*>(d.residual) + begin;
  const Lanes<W> left = offered(grad, residual, count) - sent(d, d.own, row, begin, count);
  store_kept(residual, left, count, d.first + begin, d.draws);
  Lanes<W> total = sent(d, 0, row, begin, count);
  for (int64_t rank = 1; rank < d.ranks; ++rank) total = total + sent(d, rank, row, begin, count);
  store(grad, total * broadcast(W(d.scale)), count);
}

template <class R, class T> void two_value_decode_units(const TwoValueDecode<T>& d, int64_t first, int64_t last) {
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t row = unit / d.units.per_row, end = unit_begin(d.units, unit + 1);
    int64_t i = unit_begin(d.units, unit);
    for (; i + kLanes <= end; i += kLanes) two_value_group<R>(d, row, i, kLanes);
    if (i < end) two_value_group<R>(d, row, i, rest_of(end - i));
  }
}
template <class T> void two_value_decode(const TwoValueDecode<T>& d, int64_t first, int64_t last) {
  return d.short_kept ? two_value_decode_units<BFloat16>(d, first, last)
                      : two_value_decode_units<Work<T>>(d, first, last);
}
