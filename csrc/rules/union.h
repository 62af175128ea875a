// The union of what ranks have: a bit for each block of consecutive elements of a tensor, the last of which may be
// shorter. A rank's bits say which blocks hold an element that is not 0; NaN counts as not 0.
#pragma once
#include "rules/common.h"

namespace hvc {

HVC_RULE int ones_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

// The bits below bit `at` of a word, which is below 64.
HVC_RULE uint64_t bits_below(int64_t at) { return (uint64_t(1) << at) - 1; }

// Of word number `word`, those that stand for blocks of so many elements.
HVC_RULE uint64_t bits_inside(uint64_t bits, int64_t word, int64_t elements, int64_t block) {
  const int64_t left = ceil_div(elements, block) - word * kWordBits;
  return left >= kWordBits ? bits : bits & bits_below(left);
}

// How many elements a word's bits stand for; far below 0 where one of them is that of no block.
constexpr int64_t kOfNoBlock = -(int64_t(1) << 62);
HVC_RULE int64_t elements_of(uint64_t bits, int64_t word, int64_t elements, int64_t block) {
  const uint64_t inside = bits_inside(bits, word, elements, block);
  const int64_t blocks = ceil_div(elements, block), last = blocks - 1 - word * kWordBits;
  const bool has_last = last < kWordBits && (inside >> last & 1) != 0;
  return ones_of(inside) * block - (has_last ? blocks * block - elements : 0) + (bits != inside ? kOfNoBlock : 0);
}

}  // namespace hvc
