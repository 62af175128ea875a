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

// Writes the scale, and zeros after the bits of a short block.
HVC_INLINE void finish_record(uint8_t* record, int64_t block, int64_t count, float scale) {
  memcpy(record, &scale, sizeof scale);
  const int64_t written = kScaleBytes + ceil_div(count, kLanes) * 4;
  memset(record + written, 0, size_t(record_bytes(block) - written));
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
    finish_record(record, o.block, end - begin, record_scale(kRule, combine(sums), end - begin));
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

// One block of a fold: where it is, and every rank's share in the mean.
template <class W> struct FoldedBlock {
  const Fold<W>& o;
  int64_t at, begin, end;
  const W* shares;
};

template <class W, class Visit> HVC_INLINE void each_group(const FoldedBlock<W>& b, const Visit& visit) {
  int64_t i = b.begin;
  for (; i + kLanes <= b.end; i += kLanes) visit(i, kLanes);
  if (i < b.end) visit(i, rest_of(b.end - i));
}

// The mean of what the ranks sent, and what the owner kept; its signs are written.
template <class W> HVC_INLINE Lanes<W> fold_group(const FoldedBlock<W>& b, int64_t i, int count) {
  const auto sent = [&](int64_t rank) __attribute__((always_inline)) {
    const uint32_t bits = record_bits(b.o.parts[rank] + b.at, i - b.begin);
    return select(bits, broadcast(b.shares[rank]), broadcast(-b.shares[rank]));
  };
  Lanes<W> sum = sent(0);
  for (int64_t rank = 1; rank < b.o.ranks; ++rank) sum = sum + sent(rank);
  const uint32_t valid = valid_lanes(count);
  sum = select(valid, sum + load(b.o.kept + i, count), broadcast(W(0)));
  put_record_bits(b.o.out + b.at, i - b.begin, sign_bit(sum) & valid);
  return sum;
}

template <class W>
HVC_INLINE void keep_rest(const FoldedBlock<W>& b, int64_t i, int count, const Lanes<W>& sum, W scale) {
  const uint32_t bits = record_bits(b.o.out + b.at, i - b.begin);
  const Lanes<W> left = sum - select(bits, broadcast(scale), broadcast(-scale));
  store(b.o.left + i, select(below(magnitude(left), infinity<W>), left, broadcast(W(0))), count);
}

// The scale is that of the sums: known when all of them are.
template <ScaleRule kRule, class W> HVC_INLINE float fold_measured(const FoldedBlock<W>& b) {
  Lanes<double> sums = broadcast(0.0);
  each_group(b, [&](int64_t i, int count) __attribute__((always_inline)) {
    const Lanes<W> sum = fold_group(b, i, count);
    store(b.o.left + i, sum, count);
    sums = sums + terms<kRule>(sum);
  });
  const float scale = record_scale(kRule, combine(sums), b.end - b.begin);
  each_group(b, [&](int64_t i, int count)
                    __attribute__((always_inline)) { keep_rest(b, i, count, load(b.o.left + i, count), W(scale)); });
  return scale;
}

// The scale is that of the parts: known beforehand, and one pass is enough.
template <class W> HVC_INLINE float fold_shared(const FoldedBlock<W>& b) {
  double sum = 0;
  for (int64_t rank = 0; rank < b.o.ranks; ++rank) sum += double(scale_of_record(b.o.parts[rank] + b.at));
  const float scale = record_scale(kShared, sum, b.o.ranks);
  each_group(b, [&](int64_t i, int count)
                    __attribute__((always_inline)) { keep_rest(b, i, count, fold_group(b, i, count), W(scale)); });
  return scale;
}

template <ScaleRule kRule, class W> void record_fold_blocks(const Fold<W>& o, int64_t first, int64_t last) {
  std::vector<W> shares(size_t(o.ranks));
  for (int64_t index = first; index < last; ++index) {
    const int64_t begin = index * o.block, end = std::min(begin + o.block, o.count);
    const int64_t at = index * record_bytes(o.block);
    for (int64_t rank = 0; rank < o.ranks; ++rank)
      shares[size_t(rank)] = W(double(scale_of_record(o.parts[rank] + at)) / double(o.ranks));
    const FoldedBlock<W> block{o, at, begin, end, shares.data()};
    float scale;
    if constexpr (kRule == kShared)
      scale = fold_shared(block);
    else
      scale = fold_measured<kRule>(block);
    finish_record(o.out + at, o.block, end - begin, scale);
  }
}

template <class W> void record_fold(const Fold<W>& o, int64_t first, int64_t last) {
  if (o.rule == kShared)
    record_fold_blocks<kShared>(o, first, last);
  else if (o.rule == kRoot)
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
