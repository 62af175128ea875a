// Noise-shaped merging of signs: what a merge rounds off is kept, and added to the next one at the same place.
//
// A merge of m ranks' bits rounds their sum to one bit. Its memory is a number from 0 to m - 1, a carry: every rank's
// 1 counts it up by one, modulo m, and the merged bit is 1 where that passes m - 1. Merging a bit that already stands
// for m - 1 ranks with one more is the same: m - 1 is -1 modulo m, so that bit counts down by one, and the merged bit
// is it, unless the count passes an end.
//
// Counts are bit-sliced, as in majority.h: row l holds bit l of 64 or more counts at once. What lies in memory is the
// count XOR `middle_count`, so that memory of zeros stands for having rounded off nothing yet.
#pragma once
#include "rules/common.h"

namespace hvc {

// Counts stay below the number of ranks, 65535 at most.
//
// Loops over rows name this limit and leave at `rows`: nvcc unrolls them, so that every index is a constant and the
// counts of a thread stay in registers.
constexpr int kMaxRows = 16;
#if defined(__CUDA_ARCH__)
#define HVC_UNROLL_ROWS _Pragma("unroll")
#else
#define HVC_UNROLL_ROWS
#endif

// Rows that counts below `ranks` need.
HVC_RULE int count_rows(int64_t ranks) {
  int rows = 0;
  while ((ranks - 1) >> rows != 0) ++rows;
  return rows;
}

HVC_RULE uint64_t middle_count(int64_t ranks) { return uint64_t(ranks) / 2; }

template <class Bits> HVC_RULE Bits all_where(bool one) { return one ? ~Bits{} : Bits{}; }

// Counts up in the lanes of `up` and down in those of `down`, modulo `ranks`; returns the lanes that passed an end.
// `before` and `after` may be the same.
template <class Bits>
HVC_RULE Bits count_once(const Bits* before, Bits* after, int rows, int64_t ranks, const Bits& up, const Bits& down) {
  const uint64_t middle = middle_count(ranks), top = uint64_t(ranks - 1);
  Bits end = up | down;
  HVC_UNROLL_ROWS
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= rows) break;
    // At the end is who goes up from `top` or down from 0: who has the bits of `top` there, or their opposite.
    const Bits at_top = ~(before[l] ^ all_where<Bits>((middle ^ top) >> l & 1));
    const Bits at_zero = ~(before[l] ^ all_where<Bits>(middle >> l & 1));
    end &= (up & at_top) | (down & at_zero);
  }
  Bits carry = (up | down) & ~end;
  HVC_UNROLL_ROWS
  for (int l = 0; l < kMaxRows; ++l) {
    if (l >= rows) break;
    const Bits old = before[l];
    after[l] = old ^ carry ^ (end & all_where<Bits>(top >> l & 1));
    carry &= old ^ down ^ all_where<Bits>(middle >> l & 1);
  }
  return end;
}

// One bit for `ranks` ranks: `theirs` stands for all of them but one, `mine` for that one.
template <class Bits> HVC_RULE Bits shaped_merge(const Bits& mine, const Bits& theirs, const Bits* before, Bits* after,
                                                 int rows, int64_t ranks) {
  return theirs ^ count_once(before, after, rows, ranks, Bits(mine & ~theirs), Bits(theirs & ~mine));
}

}  // namespace hvc
