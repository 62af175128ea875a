// Bit-sliced counting: plane l of a counter holds bit l of 64 (or more) counts at once.
#pragma once
#include "rules/common.h"

namespace hvc {

// Counts reach the number of parts, 65535 at most.
constexpr int kMaxPlanes = 17;

// Adds three bits per lane: `a` becomes their sum, `c` the carry, which is worth two. Five operations.
template <class Bits> HVC_RULE void full_add(Bits& a, const Bits& b, Bits& c) {
  const Bits either = a ^ b, carry = (a & b) | (either & c);
  a = either ^ c;
  c = carry;
}

// One plane of "count >= threshold", from the least significant plane up; starts from all ones.
template <class Bits> HVC_RULE void at_least(bool threshold_bit, const Bits& plane, Bits& so_far) {
  if (threshold_bit)
    so_far &= plane;
  else
    so_far |= plane;
}

// At least half: a tie is 1.
HVC_RULE int64_t majority_threshold(int64_t parts) { return (parts + 1) / 2; }

// The valid bits of word `word` of a vector of `count` bits.
HVC_RULE uint64_t valid_bits(int64_t word, int64_t count) {
  const int64_t rest = count - word * kWordBits;
  return rest >= kWordBits ? ~uint64_t(0) : rest <= 0 ? 0 : (uint64_t(1) << rest) - 1;
}

}  // namespace hvc
