// Signs with a scale for each block, 32 elements at a time. Compiled once per instruction set; see foreach_isa.h.

#include "bit_lanes.h"

HVC_INLINE uint32_t record_bits(const uint8_t* record, int64_t element) {
  uint32_t bits;
  memcpy(&bits, record + kScaleBytes + element / 8, sizeof bits);
  return bits;
}
HVC_INLINE void put_record_bits(uint8_t* record, int64_t element, uint32_t bits) {
  memcpy(record + kScaleBytes + element / 8, &bits, sizeof bits);
}

// Writes what only a whole block gives: the scale, and zeros behind the bits of a short one.
HVC_INLINE float finish_record(uint8_t* record, int64_t block, int64_t count, ScaleRule rule,
                               const Lanes<double>& sums) {
  const float scale = record_scale(rule, combine(sums), count);
  memcpy(record, &scale, sizeof scale);
  const int64_t written = kScaleBytes + ceil_div(count, kLanes) * 4;
  memset(record + written, 0, size_t(record_bytes(block) - written));
  return scale;
}

template <ScaleRule kRule, class W> HVC_INLINE Lanes<double> terms(const Lanes<W>& x) {
  return scale_term(kRule, widen<double>(magnitude(x)));
}

template <ScaleRule kRule, bool kResidual, class T>
int64_t record_offer_blocks(const RecordOffer<T>& o, int64_t first, int64_t last) {
  using W = Work<T>;
  int64_t nonfinite = 0;
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * o.block, end = std::min(begin + o.block, o.count);
    uint8_t* record = o.records + index * record_bytes(o.block);
    Lanes<double> sums = broadcast(0.0);
    const auto add = [&](int64_t i, int count) __attribute__((always_inline)) {
      const Lanes<W> x = offered(o.grad + i, kResidual ? o.residual + i : nullptr, count);
      const uint32_t valid = valid_lanes(count);
      put_record_bits(record, i - begin, sign_bit(x) & valid);
      nonfinite += __builtin_popcount(~can_be_kept(x) & valid);
      sums = sums + terms<kRule>(x);
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) add(i, kLanes);
    if (i < end) add(i, rest_of(end - i));
    finish_record(record, o.block, end - begin, kRule, sums);
  }
  return nonfinite;
}

template <class T> int64_t record_offer(const RecordOffer<T>& o, int64_t first, int64_t last) {
  if (o.rule == kRoot)
    return o.residual ? record_offer_blocks<kRoot, true>(o, first, last)
                      : record_offer_blocks<kRoot, false>(o, first, last);
  return o.residual ? record_offer_blocks<kMean, true>(o, first, last)
                    : record_offer_blocks<kMean, false>(o, first, last);
}

// The mean of what the ranks sent, and what the owner kept: written, with its signs, and its terms for the scale.
template <ScaleRule kRule, class W> HVC_INLINE Lanes<double> fold_group(const RecordFold<W>& o, int64_t at,
                                                                        const W* shares, int64_t begin, int64_t i,
                                                                        int count) {
  const auto sent = [&](int64_t rank) __attribute__((always_inline)) {
    return select(record_bits(o.parts[rank] + at, i - begin), broadcast(shares[rank]), broadcast(-shares[rank]));
  };
  Lanes<W> total = sent(0);
  for (int64_t rank = 1; rank < o.ranks; ++rank) total = total + sent(rank);
  const uint32_t valid = valid_lanes(count);
  total = select(valid, total + load(o.kept + i, count), broadcast(W(0)));
  store(o.left + i, total, count);
  put_record_bits(o.out + at, i - begin, sign_bit(total) & valid);
  return terms<kRule>(total);
}

template <ScaleRule kRule, class W> void record_fold_blocks(const RecordFold<W>& o, int64_t first, int64_t last) {
  std::vector<W> shares(size_t(o.ranks));
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * o.block, end = std::min(begin + o.block, o.count);
    const int64_t at = index * record_bytes(o.block);
    for (int64_t rank = 0; rank < o.ranks; ++rank)
      shares[size_t(rank)] = W(double(scale_of_record(o.parts[rank] + at)) / double(o.ranks));
    Lanes<double> sums = broadcast(0.0);
    for (int64_t i = begin; i < end; i += kLanes)
      sums = sums + fold_group<kRule>(o, at, shares.data(), begin, i, int(std::min<int64_t>(kLanes, end - i)));
    const W scale = finish_record(o.out + at, o.block, end - begin, kRule, sums);
    for (int64_t i = begin; i < end; i += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, end - i));
      const uint32_t bits = record_bits(o.out + at, i - begin);
      const Lanes<W> left = load(o.left + i, count) - select(bits, broadcast(scale), broadcast(-scale));
      const uint32_t finite = mask_of<Test::below>(magnitude(left), infinity<W>);
      store(o.left + i, select(finite, left, broadcast(W(0))), count);
    }
  }
}

template <class W> void record_fold(const RecordFold<W>& o, int64_t first, int64_t last) {
  if (o.rule == kRoot)
    record_fold_blocks<kRoot>(o, first, last);
  else
    record_fold_blocks<kMean>(o, first, last);
}

template <class T> void record_decode(const RecordDecode<T>& o, int64_t first, int64_t last) {
  using W = Work<T>;
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * o.block, end = std::min(begin + o.block, o.count);
    const uint8_t* record = o.records + index * record_bytes(o.block);
    const W own = o.scales[index], out = W(scale_of_record(record)) * W(o.scale);
    const auto decode = [&](int64_t i, int count) __attribute__((always_inline)) {
      const Lanes<W> x = offered(o.grad + i, o.residual + i, count);
      store(o.residual + i, less_value(x, signed_step(sign_bit(x), broadcast(own)), false), count);
      store(o.grad + i, select(record_bits(record, i - begin), broadcast(out), broadcast(-out)), count);
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) decode(i, kLanes);
    if (i < end) decode(i, rest_of(end - i));
  }
}
