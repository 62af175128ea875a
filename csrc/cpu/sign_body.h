// The one-bit loops. Compiled once per instruction set; see foreach_isa.h.

#include "bit_lanes.h"

// Full groups of 32 inline, the last one of a short block on its own.
template <bool kCoin, class T, class R>
HVC_INLINE void offer_group(const T* grad, const R* residual, const Work<T>* divisor, int count, BitWriter& writer,
                            Lanes<Work<T>>& sums, int64_t& nonfinite) {
  const Lanes<Work<T>> x = offered(grad, residual, divisor, count);
  const uint32_t valid = valid_lanes(count);
  const uint32_t zeros = kCoin ? mask_of<Test::equal>(x) & valid : 0;
  const uint32_t ones = kCoin ? mask_of<Test::greater>(x) : sign_bit(x) & valid;
  sums = sums + magnitude(x);
  nonfinite += __builtin_popcount(~can_be_kept(x) & valid);
  writer.put(ones, zeros, count);
}

// R is the type of the residual, or void where there is none.
template <bool kCoin, class R, class T>
HVC_INLINE Work<T> offer_block(const Offer<T>& o, int64_t begin, int64_t end, BitWriter& writer, int64_t& nonfinite) {
  Lanes<Work<T>> sums = broadcast(Work<T>(0));
  const auto* residual = kept_at<R, Work<T>>(o.residual);
  const auto group = [&](int64_t i, int count) __attribute__((always_inline)) {
    offer_group<kCoin>(o.grad + i, residual ? residual + i : nullptr, o.divisor ? o.divisor + i : nullptr, count,
                       writer, sums, nonfinite);
  };
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) group(i, kLanes);
  if (i < end) group(i, int(end - i));
  return combine(sums);
}

template <bool kCoin, class R, class T> OfferResult offer_units(const Offer<T>& o, int64_t first, int64_t last) {
  Coins coins(kCoin ? *o.key : Stream{}, o.word_offset);
  BitWriter writer(o.bits, unit_begin(o.units, first), &coins);
  OfferResult result{};
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(o.units, unit), end = unit_begin(o.units, unit + 1);
    double sum = 0;
    for (int64_t block = begin; block < end; block += kBlock)
      sum += double(offer_block<kCoin, R>(o, block, std::min(block + kBlock, end), writer, result.nonfinite));
    if (o.unit_sums) o.unit_sums[unit] = sum;
  }
  result.head = writer.finish();
  return result;
}

template <class R, class T> OfferResult offer_of(const Offer<T>& o, int64_t first, int64_t last) {
  return o.key ? offer_units<true, R>(o, first, last) : offer_units<false, R>(o, first, last);
}
template <class T> OfferResult offer(const Offer<T>& o, int64_t first, int64_t last) {
  if (!o.residual) return offer_of<void>(o, first, last);
  return o.short_kept ? offer_of<BFloat16>(o, first, last) : offer_of<Work<T>>(o, first, last);
}

template <class W>
HVC_INLINE Mask<W> own_bits(const Lanes<W>& x, int64_t begin, int count, bool has_key, Coins& coins) {
  if (!has_key) return sign_bit(x);
  const Mask<W> zero = mask_of<Test::equal>(x), above = mask_of<Test::greater>(x);
  if (__builtin_expect(!any_of(zero), 1)) return above;
  return mask_of_bits<W>(above | (zero & valid_lanes(count) & coins.bits(begin, count)));
}

template <Feedback kFeedback, bool kStream, class R, class T>
HVC_INLINE void decode_group(const Decode<T>& d, int64_t begin, int count, Work<T> step, Work<T> out, Coins& coins) {
  using W = Work<T>;
  const uint32_t bits = bits_at(d.bits, begin, count), zeros = d.zeros ? bits_at(d.zeros, begin, count) : 0;
  const auto value = [&](const Lanes<W>& size) {
    return d.zeros ? signed_step_or_zero(zeros, bits, size) : signed_step(bits, size);
  };
  T* grad = d.grad + begin;
  const W* divisor = d.divisor ? d.divisor + begin : nullptr;
  if constexpr (kFeedback != kFeedbackNone) {
    R* residual = static_cast<R*>(d.residual) + begin;
    const Lanes<W> x = offered(grad, residual, divisor, count);
    Lanes<W> left = x;
    if constexpr (kFeedback != kFeedbackMomentum) {
      constexpr bool kOfOthers = kFeedback == kFeedbackGlobal;
      if constexpr (kOfOthers)
        left = less_value(x, value(broadcast(step)), kOfOthers);
      else
        left =
            less_value(x, signed_step(own_bits(x, begin, count, d.key != nullptr, coins), broadcast(step)), kOfOthers);
    }
    store_kept(residual, left * broadcast(W(d.decay)), count, d.word_offset * kWordBits + begin, d.draws);
  }
  Lanes<W> decoded = value(broadcast(out));
  if (divisor) decoded = decoded * load(divisor, count);
  if constexpr (kStream)
    stream(grad, decoded);
  else
    store(grad, decoded, count);
}

template <Feedback kFeedback, bool kStream, class R, class T>
void decode_units(const Decode<T>& d, int64_t first, int64_t last) {
  Coins coins(d.key ? *d.key : Stream{}, d.word_offset);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(d.units, unit), end = unit_begin(d.units, unit + 1);
    const Work<T> step = d.steps[unit / d.units.per_row], out = step * Work<T>(d.scale);
    int64_t i = begin;
    if (const int lead = kStream ? to_cache_line(d.grad + begin, end - begin) : 0) {
      decode_group<kFeedback, false, R>(d, i, lead, step, out, coins);
      i += lead;
    }
    for (; i + kLanes <= end; i += kLanes) decode_group<kFeedback, kStream, R>(d, i, kLanes, step, out, coins);
    if (i < end) decode_group<kFeedback, false, R>(d, i, rest_of(end - i), step, out, coins);
  }
  if (kStream) stream_fence();
}

template <class R, class T> void decode_with(const Decode<T>& d, int64_t first, int64_t last) {
  if (d.feedback == kFeedbackGlobal) return decode_units<kFeedbackGlobal, false, R>(d, first, last);
  if (d.feedback == kFeedbackOwn) return decode_units<kFeedbackOwn, false, R>(d, first, last);
  decode_units<kFeedbackMomentum, false, R>(d, first, last);
}
template <class T> void decode(const Decode<T>& d, int64_t first, int64_t last) {
  if (d.feedback != kFeedbackNone)
    return d.short_kept ? decode_with<BFloat16>(d, first, last) : decode_with<Work<T>>(d, first, last);
  if (d.stream) return decode_units<kFeedbackNone, true, Work<T>>(d, first, last);
  decode_units<kFeedbackNone, false, Work<T>>(d, first, last);
}

template <class T> void pack(const T* x, int64_t count, uint64_t* bits, int64_t first, int64_t last) {
  const auto half = [&](int64_t begin, int n) { return sign_bit(load(x + begin, n)) & valid_lanes(n); };
  for (int64_t word = first; word < last; ++word) {
    const int64_t begin = word * kWordBits, rest = count - begin;
    if (__builtin_expect(rest >= kWordBits, 1))
      bits[word] = half(begin, kLanes) | uint64_t(half(begin + kLanes, kLanes)) << kLanes;
    else if (rest > kLanes)
      bits[word] = half(begin, kLanes) | uint64_t(half(begin + kLanes, int(rest) - kLanes)) << kLanes;
    else
      bits[word] = half(begin, int(rest));
  }
}
