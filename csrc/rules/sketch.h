// The count sketch (Charikar, Chen, Farach-Colton, 2002) by blocks: where every element of a bucket is added, and
// what a table of such sums says about one element.
//
// A table has 1, 3 or 5 rows of `columns` cells. Element by element hashing would cost a random access and a hash for
// each element and row, so 16 consecutive elements, a block, go to 16 consecutive cells, a place, together:
//
//   A row has C = columns / 16 places, C prime. Each run of C blocks is a layer, and in every row it is laid over the
//   places by a bijection of its own, b -> (step * b + start) mod C with step in [1, C) and start in [0, C).
//   In its place a block is turned: element i goes to cell i XOR m, m being 4 random bits, with a random sign.
//
// What this gives:
//   1. A cell gets at most one element of each layer. Layers are added in index order, so the order of every sum is
//      fixed, and so are its bits, however the blocks of a layer are shared among threads.
//   2. Two elements of one layer never meet. Two of different layers meet with probability 1/C (start is uniform)
//      times 1/16 (m is uniform) = 1/columns. Signs are independent, so sign * cell is an unbiased estimate with
//      variance at most (||x||^2 - x_j^2) / columns in each row.
//   3. Nothing smaller than a block is hashed or fetched, and the place of the next block costs an addition.
#pragma once
#include "rules/half.h"
#include "rules/philox.h"

namespace hvc {

constexpr int kSketchBlock = 16;
constexpr int kSketchRows = 5;  // at most

struct SketchMap {
  int rows;
  uint32_t places;  // C
  Stream key;
};

HVC_RULE int64_t sketch_columns(const SketchMap& map) { return int64_t(map.places) * kSketchBlock; }

// ---- random numbers ---------------------------------------------------------------------------------------
// Digit 0 of the stream holds the bits of blocks (group = block), digit 1 + row the bijections of that row
// (group = layer): no counter is used twice. A bucket has fewer than 2^31 elements, so both fit 32 bits.

HVC_RULE Counter sketch_draw(const Stream& s, uint32_t digit, uint64_t group) {
  return philox4x32({uint32_t(group), s.c1 | digit, s.c2, s.c3}, s.k0, s.k1);
}

// floor(64 random bits * bound / 2^64): every value is as likely as another to 2^-32.
HVC_RULE uint32_t scaled_draw(uint32_t low, uint32_t high, uint32_t bound) {
  return uint32_t((uint64_t(high) * bound + (uint64_t(low) * bound >> 32)) >> 32);
}

// The bijection of one row and layer.
struct Walk {
  uint32_t step, start;
};
HVC_RULE Walk walk_of(const SketchMap& map, int row, uint64_t layer) {
  const Counter r = sketch_draw(map.key, 1 + uint32_t(row), layer);
  return {1 + scaled_draw(r.c0, r.c1, map.places - 1), scaled_draw(r.c2, r.c3, map.places)};
}
HVC_RULE uint32_t place_of(const Walk& walk, uint32_t places, uint64_t block_of_layer) {
  return uint32_t((walk.step * block_of_layer + walk.start) % places);
}

// 20 bits of a block for each row: signs of its elements, and how it is turned.
struct BlockBits {
  uint64_t low, high;
};
HVC_RULE BlockBits block_bits(const Stream& s, uint64_t block) {
  const Counter r = sketch_draw(s, 0, block);
  return {uint64_t(r.c1) << 32 | r.c0, uint64_t(r.c3) << 32 | r.c2};
}
HVC_RULE uint32_t sign_bits(const BlockBits& bits, int row) {
  return uint32_t(row < 4 ? bits.low >> (16 * row) : bits.high) & 0xffffu;
}
HVC_RULE uint32_t turn_of(const BlockBits& bits, int row) { return uint32_t(bits.high >> (16 + 4 * row)) & 15u; }

// ---- one element ------------------------------------------------------------------------------------------

template <class W> struct IntOf {
  using type = int32_t;
  static constexpr type kMagnitude = 0x7fffffff, kNan = 0x7fc00000;
};
template <> struct IntOf<double> {
  using type = int64_t;
  static constexpr type kMagnitude = 0x7fffffffffffffff, kNan = 0x7ff8000000000000;
};
template <class W> using Int = typename IntOf<W>::type;

template <class W> HVC_RULE W negated_if(uint32_t negative, W value) {
  const Int<W> sign = -Int<W>(negative) & ~IntOf<W>::kMagnitude;  // no branch: nobody can predict it
  return bit_cast<W>(Int<W>(bit_cast<Int<W>>(value) ^ sign));
}

// Medians and magnitudes are compared as integers: a total order on every device. Zeros have an order, and every NaN,
// whose sign and payload differ from one processor to another, is one and the same number above infinity.
// Turned again, an order is the bits of its number; without the sign they are its magnitude.
template <class Bits, class I> HVC_RULE Bits turn_negative(Bits bits, I magnitude) {
  return bits < 0 ? bits ^ magnitude : bits;
}
template <class W> HVC_RULE Int<W> order_of(W value) {
  const Int<W> bits = bit_cast<Int<W>>(value);
  if ((bits & IntOf<W>::kMagnitude) > bit_cast<Int<W>>(infinity<W>)) return IntOf<W>::kNan;
  return turn_negative(bits, IntOf<W>::kMagnitude);
}

template <class I> HVC_RULE I lesser(I a, I b) { return a < b ? a : b; }
template <class I> HVC_RULE I greater(I a, I b) { return a < b ? b : a; }
template <class I> HVC_RULE I median_of_3(I a, I b, I c) { return greater(lesser(a, b), lesser(c, greater(a, b))); }
// Of the first two and the next two, the smallest and the largest cannot be the median of five.
template <class I> HVC_RULE I median_of_5(const I* v) {
  return median_of_3(v[4], greater(lesser(v[0], v[1]), lesser(v[2], v[3])),
                     lesser(greater(v[0], v[1]), greater(v[2], v[3])));
}
template <class I> HVC_RULE I median(const I* v, int rows) {
  return rows == 1 ? v[0] : rows == 3 ? median_of_3(v[0], v[1], v[2]) : median_of_5(v);
}

// Where one element lies. Any position is safe: its place is always one of the table's.
struct Element {
  uint64_t block, layer;
  uint32_t block_of_layer, lane;
};
HVC_RULE Element element_of(const SketchMap& map, uint64_t position) {
  const uint64_t block = position / kSketchBlock, layer = block / map.places;
  return {block, layer, uint32_t(block - layer * map.places), uint32_t(position % kSketchBlock)};
}

HVC_RULE int64_t cell_of(const SketchMap& map, int row, const Walk& walk, const BlockBits& bits, const Element& e) {
  const int64_t place = place_of(walk, map.places, e.block_of_layer);
  return row * sketch_columns(map) + place * kSketchBlock + int64_t(e.lane ^ turn_of(bits, row));
}

// A part of the bucket that may be chosen from: `units` counts the blocks of all spans before this one.
struct SketchSpan {
  int64_t start, count, units;
};
HVC_RULE int64_t span_blocks(const SketchSpan& span) { return ceil_div(span.count, kSketchBlock); }

// The last span that does not begin after a unit.
HVC_RULE int64_t span_index(const SketchSpan* spans, int64_t count, int64_t unit) {
  int64_t first = 0, end = count;
  while (end - first > 1) {
    const int64_t middle = (first + end) / 2;
    (spans[middle].units <= unit ? first : end) = middle;
  }
  return first;
}

}  // namespace hvc
