// One unit of each of k groups, chosen at random: what all ranks with the same key agree on without a word.
//
//   unit      `block` neighbouring elements, most often one; the last unit of a tensor may have fewer
//   group i   units floor(units i / k) to floor(units (i + 1) / k) - 1
//   chosen    begin + floor(draw * size / 2^32), where draw number n is 32 bits: word n mod 4 of group n / 4, digit 0
//
// Every unit of a group is as likely as another to size / 2^32.
#pragma once
#include "rules/philox.h"

namespace hvc {

constexpr int kDrawsPerSampleGroup = 4;

struct Sampling {
  int64_t count, k;
  Stream key;
  int64_t first;  // the draw of group 0
  int64_t block;
};
HVC_RULE int64_t units_of(const Sampling& s) { return ceil_div(s.count, s.block); }

// The groups in order, without a division for each.
struct DrawnBlocks {
  int64_t begin, size;  // of the current group
  int64_t step, rest, part, k;
};
HVC_RULE DrawnBlocks blocks_from(int64_t count, int64_t k, int64_t index) {
  const int64_t step = count / k, rest = count % k, part = rest * index % k;
  return {step * index + rest * index / k, step + (part + rest >= k), step, rest, part, k};
}
HVC_RULE void next_block(DrawnBlocks& b) {
  b.begin += b.size;
  b.part += b.rest;
  b.part -= b.part >= b.k ? b.k : 0;
  b.size = b.step + (b.part + b.rest >= b.k);
}

HVC_RULE int64_t chosen_of(uint32_t draw, int64_t size) { return int64_t(uint64_t(draw) * uint64_t(size) >> 32); }

HVC_RULE Counter sample_draws(const Stream& s, uint64_t group) {
  return philox4x32({uint32_t(group), s.c1, s.c2, s.c3}, s.k0, s.k1);
}

}  // namespace hvc
