// Noise-shaped folding of signs to three values, and their bytes.
//
// The owner of a chunk rounds the sum of m ranks' signs and what it rounded off before, y, to m t: t is 1 where y is at
// least m / 2, -1 where it is at most -m / 2, else 0. So a y in the middle between two values goes to the outer one,
// and what is kept changes its sign: it averages out at once, where a tie to one side would be kept until it is used
// up.
//
// As in shaped.h the memory is a count. Signs of +-1 sum to twice the ones, less m: a one counts up by two, or by one
// if m is even, as counts are even then too and half of them is kept. t + 1 is how often the count passes the end.
// Where m is a multiple of 4 there are ties: -m / 2 and m / 2 are both kept, and the first time the count passes from m
// / 2 to 1, the second time from m / 2 - 1 to 0. Counts lie in memory as those of shaped.h do.
//
// On the wire five values take a byte, 1.6 bits each: 5 words of 64 lanes become a group of 64 bytes, and byte l has
// the digits of lane l, of word k that of 3^k. So a group is packed and unpacked without moving bits between lanes.
#pragma once
#include "rules/shaped.h"

namespace hvc {

constexpr int64_t kGroupWords = 5, kGroupBytes = 64;

// What a one counts by, and how many counts there are.
HVC_RULE int64_t ternary_step(int64_t ranks) { return ranks % 2 ? 2 : 1; }
HVC_RULE int64_t ternary_states(int64_t ranks) { return ranks % 2 ? ranks : ranks / 2 + (ranks % 4 == 0); }

// Digits, lane by lane: `least_one` where one is 1 or 2, `two` where it is 2.
template <class Bits> struct Trits {
  Bits least_one{}, two{};
  HVC_RULE void add(const Bits& passed) {
    two |= least_one & passed;
    least_one |= passed;
  }
};

// Whether the count in each lane is `value`, of the lanes given.
template <class Bits>
HVC_RULE Bits counts_equal(Bits lanes, const Bits* counts, int rows, uint64_t middle, uint64_t value) {
  HVC_UNROLL_ROWS
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= rows) break;
    lanes &= ~(counts[l] ^ all_where<Bits>((middle ^ value) >> l & 1));
  }
  return lanes;
}

// Counts ones where there are ties; returns the lanes that passed the end of their turn.
template <class Bits>
HVC_RULE Bits count_with_ties(const Bits& ones, Bits* counts, int rows, int64_t ranks, const Trits<Bits>& digits) {
  const uint64_t half = uint64_t(ranks) / 2, middle = middle_count(ternary_states(ranks));
  const Bits first = counts_equal(Bits(ones & ~digits.least_one), counts, rows, middle, half);
  const Bits second = counts_equal(Bits(ones & digits.least_one & ~digits.two), counts, rows, middle, half - 1);
  Bits carry = ones & ~(first | second);
  HVC_UNROLL_ROWS
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= rows) break;
    const Bits old = counts[l];
    counts[l] =
        old ^ carry ^ (first & all_where<Bits>((half ^ 1) >> l & 1)) ^ (second & all_where<Bits>((half - 1) >> l & 1));
    carry &= old ^ all_where<Bits>(middle >> l & 1);
  }
  return first | second;
}

// Counts one rank's bits; `counts` have `rows` rows.
template <class Bits>
HVC_RULE void ternary_add(const Bits& ones, Bits* counts, int rows, int64_t ranks, Trits<Bits>& digits) {
  if (ranks % 4 == 0) return digits.add(count_with_ties(ones, counts, rows, ranks, digits));
  for (int64_t n = 0; n < ternary_step(ranks); ++n)
    digits.add(count_once(counts, counts, rows, ternary_states(ranks), ones, Bits{}));
}

// What word k of a group counts for in its bytes.
HVC_RULE uint8_t digit_weight(int k) {
  uint8_t weight = 1;
  for (; k > 0; --k) weight = uint8_t(3 * weight);
  return weight;
}

}  // namespace hvc
