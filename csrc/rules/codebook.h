// A codebook: a few magnitudes that values are sent as, so that a value is a sign and the number of a magnitude.
//
//   code     of 2, 4 or 8 bits; the number of the level nearest to |x|, and the sign in the highest bit
//   levels   2^(bits-1) float32 that rise; x counts as float32 here, at most its largest number
//   fit      the mean of all magnitudes divides them in two, the mean of each part divides that again, and so on, until
//            there are as many parts as levels: a level is the mean of its part, or that of the part before if nothing
//            is in it
//
// Magnitudes are ordered as their bits are, so the fit counts them in 1,024 cells of as many neighbouring floats each,
// and adds up their bits there: integers, for which the order does not matter. Means over cells are float64, in order.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr int kCells = 1024;
constexpr int kMostLevels = 128;
constexpr uint32_t kLargestFloat = 0x7f7fffff;

HVC_RULE int codebook_levels(int bits) { return 1 << (bits - 1); }

// |x| as the bits of a float32; NaN counts as the largest number.
template <class W> HVC_RULE uint32_t float_magnitude(W x) {
  const uint32_t bits = bit_cast<uint32_t>(float(x)) & 0x7fffffffu;
  return bits < kLargestFloat ? bits : kLargestFloat;
}

// A cell has 2^shift floats from `low` on.
HVC_RULE int cell_shift(uint32_t low, uint32_t high) {
  int shift = 0;
  while ((high - low) >> shift >= uint32_t(kCells)) ++shift;
  return shift;
}

// What a cell's values are on average, of the sum of their bits.
HVC_RULE double cell_mean(uint64_t sum, uint32_t number) {
  return number == 0 ? 0.0 : double(bit_cast<float>(uint32_t(sum / number)));
}

// Sums over the cells before each one.
struct Before {
  double* sums;
  double* numbers;

  HVC_RULE double number(int first, int end) const { return numbers[end] - numbers[first]; }
  HVC_RULE double mean(int first, int end) const { return (sums[end] - sums[first]) / number(first, end); }
};

// The first cell of [first, end) that is above the mean of these cells.
HVC_RULE int cell_above(const Before& before, int first, int end, uint32_t low, int shift) {
  if (before.number(first, end) == 0) return end;
  const uint32_t mean = float_magnitude(before.mean(first, end));
  const int above = int((mean > low ? mean - low : 0) >> shift) + 1;
  return above < first ? first : above < end ? above : end;
}

// Levels of what the cells hold. `edges` has room for one more than there are levels.
HVC_RULE void fit_levels(const Before& before, uint32_t low, int shift, int levels, int* edges, float* out) {
  edges[0] = 0;
  edges[levels] = kCells;
  for (int step = levels; step > 1; step /= 2)
    for (int i = 0; i < levels; i += step)
      edges[i + step / 2] = cell_above(before, edges[i], edges[i + step], low, shift);
  float level = 0;
  for (int i = 0; i < levels; ++i) {
    const float mean = before.number(edges[i], edges[i + 1]) == 0 ? level : float(before.mean(edges[i], edges[i + 1]));
    out[i] = level = mean > level ? mean : level;
  }
}

// The level nearest to a value, the lower of two that are as near, and its sign.
template <int kBits, class W> HVC_RULE unsigned code_of(const float* levels, W value) {
  const float magnitude = bit_cast<float>(float_magnitude(value));
  unsigned level = 0;
  for (unsigned step = 1u << (kBits - 2); step > 0; step /= 2) {
    const float middle = levels[level + step - 1] * 0.5f + levels[level + step] * 0.5f;
    level += step * unsigned(middle < magnitude);  // a branch could not be predicted
  }
  return level | unsigned(value < 0) << (kBits - 1);
}

}  // namespace hvc
