// Counters whose norm is about that of a gradient, and which add up over ranks: a count sketch of one row (Charikar,
// Chen, Farach-Colton, 2002), of which nobody asks for single elements.
//
// There are C = 16 P counters in P places, P being 8 or 16. A place has 16, as many as a block has consecutive
// elements. P blocks are a layer. In it block b goes to place b XOR s, and element i of each block to counter i XOR m
// of its place, with a random sign; s and m are drawn for each layer.
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
constexpr int kNormAlignment = 4;    // blocks: a tensor begins at a multiple of so many

// 32 blocks are a group, which has 16 random words of signs: bit 31 - b of word i is set where element i of block b is
// negated. So a vector of signs follows from the one before by a shift. Digits 0 to 3 of the stream hold these words,
// and digit 4 one word for each of the group's layers. All have the number of the group's first block, counted from the
// bucket's first element and divided by 4: as tensors begin at multiples of 4 blocks, no two groups of a bucket share
// it.
constexpr int kNormGroup = 32;
constexpr int kNormDigits = 5;
constexpr int kNormLayers = kNormGroup / 8;  // of a group, at most: P is 8 or more
static_assert(kNormLayers == 4, "a counter of the generator has a word for each layer");

HVC_RULE uint64_t norm_counter(uint64_t first_block) { return first_block / kNormAlignment; }

HVC_RULE bool norm_negates(uint32_t word, int block) { return word << block >> 31; }

// Where the elements of a layer go.
struct NormTurn {
  uint32_t word;
  HVC_RULE uint32_t place(uint32_t block, int places) const { return block ^ (word & uint32_t(places - 1)); }
  HVC_RULE uint32_t element() const { return word >> 4 & 15u; }
};

HVC_RULE int64_t norm_units(int64_t count) { return ceil_div(count, kNormUnit * kSketchBlock); }

}  // namespace hvc
