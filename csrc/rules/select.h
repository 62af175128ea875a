// Which elements are kept: the k largest magnitudes, the lower index first among equals, never a zero or a NaN.
// Positive and negative elements share one list of k, or have one each.
#pragma once
#include "rules/half.h"
#include "rules/norm.h"

namespace hvc {

constexpr int kTogether = 1;  // largest |x|
constexpr int kApart = 2;     // largest x > 0 and smallest x < 0

// Magnitudes are ordered like their bits.
template <class W> struct KeyOf {
  using type = uint32_t;
};
template <> struct KeyOf<double> {
  using type = uint64_t;
};
template <class W> using Key = typename KeyOf<W>::type;

template <class W> HVC_RULE Key<W> key_of(W x) { return Key<W>(magnitude_bits(x)); }

// 0, or 1 for what is negative where the signs are apart.
template <int kSides, class W> HVC_RULE int side_of(W x) {
  return kSides == kApart && (bit_cast<Key<W>>(x) >> (8 * sizeof(W) - 1)) != 0;
}

// Keys above `key` are kept, and the first `ties` that equal it.
template <class K> struct Cut {
  K key;
  int64_t ties;
};

// The power of two at or below a sum that is not negative, kept among the normal numbers: dividing by it is exact.
HVC_RULE double power_below(double sum) {
  const uint64_t exponent = bit_cast<uint64_t>(sum) >> 52;
  return bit_cast<double>((exponent < 1 ? 1 : exponent > 0x7fe ? 0x7fe : exponent) << 52);
}

// Which side stands for the tensor: the one whose mean removes more of the squared error; positives if equal.
// Sums of magnitudes; both are scaled alike, for their squares may be no numbers of this type.
HVC_RULE bool negatives_win(double positive_sum, int64_t positives, double negative_sum, int64_t negatives) {
  if (positives == 0 || negatives == 0) return positives == 0 && negatives != 0;
  const double unit = power_below(positive_sum > negative_sum ? positive_sum : negative_sum);
  const double positive = positive_sum / unit, negative = negative_sum / unit;
  return negative * negative / double(negatives) > positive * positive / double(positives);
}

}  // namespace hvc
