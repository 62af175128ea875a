// Noise-shaped folding of signs to three values, and their bytes.
//
// The owner of a chunk rounds the sum of m ranks' signs, and what it rounded off before, to -m, 0 or m. As in shaped.h
// its memory is a carry: signs of +-1 sum to twice the ones, less m, so every one counts up by two, modulo m, and the
// result is how often that passes the end, 0 to 2 times, less one. Where m is even the count always is, too, and half
// of it is kept: ones count by one, modulo m / 2. Counts lie in memory as those of shaped.h do.
//
// On the wire five values take a byte, 1.6 bits each: 5 words of 64 lanes become a group of 64 bytes, and byte l has
// the digits of lane l, of word k that of 3^k. So a group is packed and unpacked without moving bits between lanes.
#pragma once
#include "hvc/shaped.h"

namespace hvc {

constexpr int64_t kGroupWords = 5, kGroupBytes = 64;

// What a one counts by, and modulo what.
HVC_RULE int64_t ternary_count(int64_t ranks) { return ranks % 2 ? 2 : 1; }
HVC_RULE int64_t ternary_modulus(int64_t ranks) { return ranks % 2 ? ranks : ranks / 2; }

// What is left of two planes of digits, lane by lane: `least_one` where a digit is 1 or 2, `two` where it is 2.
template <class Bits> struct Trits {
  Bits least_one{}, two{};
  HVC_RULE void add(const Bits& passed) {
    two |= least_one & passed;
    least_one |= passed;
  }
};

// Counts one rank's bits; `counts` have `rows` rows.
template <class Bits>
HVC_RULE void ternary_add(const Bits& ones, Bits* counts, int rows, int64_t ranks, Trits<Bits>& digits) {
  const int64_t modulus = ternary_modulus(ranks);
  for (int64_t n = 0; n < ternary_count(ranks); ++n)
    digits.add(count_once(counts, counts, rows, modulus, ones, Bits{}));
}

// What word k of a group counts for in its bytes.
HVC_RULE uint8_t digit_weight(int k) {
  uint8_t weight = 1;
  for (; k > 0; --k) weight = uint8_t(3 * weight);
  return weight;
}

}  // namespace hvc
