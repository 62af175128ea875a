// Random words whose bits are 1 with an exact rational probability p, drawn bit-serially.
//
// Every lane compares a uniform random number, revealed one binary digit at a time, with the digits of p, most
// significant first. The first digit that differs decides: random < p gives 1. A lane that is still undecided
// after 64 digits, or when only zeros of p remain, is 0. Once no lane is undecided further digits change nothing,
// so where an implementation stops, and how many lanes it carries together, is invisible.
#pragma once
#include "rules/philox.h"

namespace hvc {

constexpr int kMaxDigits = 64;

// Binary digits of p = numerator / denominator < 1: bit i of `ones` is digit i; digits from `count` on are 0.
struct Digits {
  uint64_t ones;
  int count;
};

HVC_RULE Digits binary_digits(uint64_t numerator, uint64_t denominator) {
  Digits digits{0, 0};
  uint64_t remainder = numerator;
  for (; digits.count < kMaxDigits && remainder != 0; ++digits.count) {
    remainder *= 2;
    if (remainder >= denominator) {
      remainder -= denominator;
      digits.ones |= uint64_t(1) << digits.count;
    }
  }
  return digits;
}

// One digit for a set of lanes: `random` and the two state words may be any type with & | ~ (a word or a vector).
template <class Bits> HVC_RULE void decide(bool one, const Bits& random, Bits& undecided, Bits& out) {
  if (one) {
    out |= undecided & ~random;
    undecided &= random;
  } else {
    undecided &= ~random;
  }
}

HVC_RULE uint64_t bernoulli_word(const Digits& p, const Stream& stream, int64_t word) {
  uint64_t undecided = ~uint64_t(0), out = 0;
  for (int digit = 0; digit < p.count && undecided != 0; ++digit)
    decide(p.ones >> digit & 1, random_word(stream, word, uint32_t(digit)), undecided, out);
  return out;
}

}  // namespace hvc
