// Counters whose norm is about that of a gradient, and which add up over ranks: a count sketch of one row (Charikar,
// Chen, Farach-Colton, 2002), of which nobody asks for single elements.
//
// There are C = 16 P counters in P places, P a power of two. A place has 16, as many as a block has consecutive
// elements. P blocks are a layer. In it block b goes to place b XOR s, and its element i to counter i XOR m of that
// place, with a random sign; s is drawn for each layer, m for each block.
//
//   1. A counter takes one element of each layer, in the order of the layers: the order of every sum is fixed.
//   2. Two elements of one layer never meet, two of different layers with probability 1/C. Signs are independent, so
//      the sum of squares of all counters is on average that of the gradient, with a variance of at most 2/C of its
//      square.
//
// Elements are counted from the first one of their tensor. 4096 blocks are a unit: it is added up in the arithmetic
// type, from 0, and units are in float64, in their order, from 0.
#pragma once
#include "rules/philox.h"
#include "rules/sketch.h"

namespace hvc {

constexpr int64_t kNormUnit = 4096;  // blocks
constexpr int kNormCounters = 256;   // at most

// 32 random bits of each block: its signs, how it is turned, and of the first one of a layer how its places are.
struct NormBits {
  uint32_t word;
  HVC_RULE uint32_t signs() const { return word & 0xffffu; }
  HVC_RULE uint32_t turn() const { return word >> 16 & 15u; }
  HVC_RULE uint32_t shift(int places) const { return word >> 20 & uint32_t(places - 1); }
};

constexpr int kNormDrawn = 4;  // blocks that one counter of the generator serves

// `block` counts from the bucket's first element.
HVC_RULE NormBits norm_bits(const Stream& s, uint64_t block) {
  const Counter r = sketch_draw(s, 0, block / kNormDrawn);
  const uint32_t of = uint32_t(block % kNormDrawn);
  return {of == 0 ? r.c0 : of == 1 ? r.c1 : of == 2 ? r.c2 : r.c3};
}

HVC_RULE int64_t norm_units(int64_t count) { return ceil_div(count, kNormUnit * kSketchBlock); }

}  // namespace hvc
