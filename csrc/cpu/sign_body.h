// The one-bit loops. Compiled once per instruction set; see foreach_isa.h.

#include "bit_lanes.h"

// Full groups of 32 inline, the last one of a short block on its own.
template <bool kCoin, class T> HVC_INLINE void offer_group(const T* grad, const Work<T>* residual, int count,
                                                           BitWriter& writer, Lanes<Work<T>>& sums,
                                                           int64_t& nonfinite) {
  const Lanes<Work<T>> x = offered(grad, residual, count);
  const uint32_t valid = valid_lanes(count);
  const uint32_t zeros = kCoin ? mask_of<Test::equal>(x) & valid : 0;
  const uint32_t ones = kCoin ? mask_of<Test::greater>(x) : sign_bit(x) & valid;
  sums = sums + magnitude(x);
  nonfinite += __builtin_popcount(~can_be_kept(x) & valid);
  writer.put(ones, zeros, count);
}

template <bool kCoin, bool kResidual, class T> HVC_INLINE Work<T> offer_block(const T* grad, const Work<T>* residual,
                                                                              int64_t count, BitWriter& writer,
                                                                              int64_t& nonfinite) {
  Lanes<Work<T>> sums = broadcast(Work<T>(0));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    offer_group<kCoin>(grad + i, kResidual ? residual + i : nullptr, kLanes, writer, sums, nonfinite);
  if (i < count)
    offer_group<kCoin>(grad + i, kResidual ? residual + i : nullptr, int(count - i), writer, sums, nonfinite);
  return combine(sums);
}

template <bool kCoin, bool kResidual, class T> OfferResult offer_units(const Offer<T>& o, int64_t first, int64_t last) {
  Coins coins(kCoin ? *o.key : Stream{}, o.word_offset);
  BitWriter writer(o.bits, unit_begin(o.units, first), &coins);
  OfferResult result{};
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(o.units, unit), end = unit_begin(o.units, unit + 1);
    double sum = 0;
    for (int64_t block = begin; block < end; block += kBlock)
      sum += double(offer_block<kCoin, kResidual>(o.grad + block, kResidual ? o.residual + block : nullptr,
                                                  std::min(kBlock, end - block), writer, result.nonfinite));
    if (o.unit_sums) o.unit_sums[unit] = sum;
  }
  result.head = writer.finish();
  return result;
}

template <class T> OfferResult offer(const Offer<T>& o, int64_t first, int64_t last) {
  if (o.key) return o.residual ? offer_units<true, true>(o, first, last) : offer_units<true, false>(o, first, last);
  return o.residual ? offer_units<false, true>(o, first, last) : offer_units<false, false>(o, first, last);
}

template <class W>
HVC_INLINE uint32_t own_bits(const Lanes<W>& x, int64_t begin, int count, bool has_key, Coins& coins) {
  if (!has_key) return sign_bit(x);
  const uint32_t zeros = mask_of<Test::equal>(x) & valid_lanes(count);
  return mask_of<Test::greater>(x) | (zeros ? zeros & coins.bits(begin, count) : 0);
}

template <Feedback kFeedback, bool kStream, class T>
HVC_INLINE void decode_group(const Decode<T>& d, int64_t begin, int count, Work<T> step, Work<T> out, Coins& coins) {
  using W = Work<T>;
  const uint32_t bits = bits_at(d.bits, begin, count), zeros = d.zeros ? bits_at(d.zeros, begin, count) : 0;
  const auto value = [&](const Lanes<W>& size) {
    return d.zeros ? signed_step_or_zero(zeros, bits, size) : signed_step(bits, size);
  };
  T* grad = d.grad + begin;
  if constexpr (kFeedback != kFeedbackNone) {
    W* residual = d.residual + begin;
    const Lanes<W> x = offered(grad, residual, count);
    Lanes<W> left = x;
    if constexpr (kFeedback != kFeedbackMomentum) {
      constexpr bool kOfOthers = kFeedback == kFeedbackGlobal;
      if constexpr (kOfOthers)
        left = less_value(x, value(broadcast(step)), kOfOthers);
      else
        left =
            less_value(x, signed_step(own_bits(x, begin, count, d.key != nullptr, coins), broadcast(step)), kOfOthers);
    }
    store(residual, left * broadcast(W(d.decay)), count);
  }
  const Lanes<W> decoded = value(broadcast(out));
  if constexpr (kStream)
    stream(grad, decoded);
  else
    store(grad, decoded, count);
}

template <Feedback kFeedback, bool kStream, class T>
void decode_units(const Decode<T>& d, int64_t first, int64_t last) {
  Coins coins(d.key ? *d.key : Stream{}, d.word_offset);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit_begin(d.units, unit), end = unit_begin(d.units, unit + 1);
    const Work<T> step = d.steps[unit / d.units.per_row], out = step * Work<T>(d.scale);
    int64_t i = begin;
    if (const int lead = kStream ? to_cache_line(d.grad + begin, end - begin) : 0) {
      decode_group<kFeedback, false>(d, i, lead, step, out, coins);
      i += lead;
    }
    for (; i + kLanes <= end; i += kLanes) decode_group<kFeedback, kStream>(d, i, kLanes, step, out, coins);
    if (i < end) decode_group<kFeedback, false>(d, i, rest_of(end - i), step, out, coins);
  }
  if (kStream) stream_fence();
}

template <class T> void decode(const Decode<T>& d, int64_t first, int64_t last) {
  if (d.feedback == kFeedbackGlobal) return decode_units<kFeedbackGlobal, false>(d, first, last);
  if (d.feedback == kFeedbackOwn) return decode_units<kFeedbackOwn, false>(d, first, last);
  if (d.feedback == kFeedbackMomentum) return decode_units<kFeedbackMomentum, false>(d, first, last);
  if (d.stream) return decode_units<kFeedbackNone, true>(d, first, last);
  decode_units<kFeedbackNone, false>(d, first, last);
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
