// A tensor as a matrix X of `rows` x `columns`, row after row, beside a product of two factors of rank r. Factors have
// one line for each component: `left` r lines of `rows` numbers, `right` r lines of `columns`.
//
// Every sum has one order, so that the result is the same for every thread count, vector width and device:
//
//   left[c][i]   the sum over j of X[i][j] right[c][j]: element j goes to lane j mod 32, a lane adds in order from 0,
//                in the arithmetic type; the 32 lanes are combined as in rules/tree.h
//   right[c][j]  the sum over i of X[i][j] left[c][i]: blocks of 256 rows, each added in order from 0; then the blocks
//                in order
//   the product  components in order: left[0][i] right[0][j], and the others added to it; cut off where the result,
//   which
//                is `scale` times it, would leave float16
//   dot, norm    of two lines: float64, blocks of 1024 elements with 32 lanes as above, the blocks in order from 0
//
// No multiplication is fused with an addition.
#pragma once
#include <cmath>
#include <type_traits>

#include "rules/kept.h"
#include "rules/philox.h"
#include "rules/tree.h"

namespace hvc {

constexpr int64_t kRowBlock = 256;

// A line of which less than this share is left, once what others span is taken out of it, depends on them.
template <class W> constexpr double kDependent = 0x1p-20;
template <> inline constexpr double kDependent<double> = 0x1p-48;

// Magnitudes compared as integers: NaN is above infinity, and the largest is the same in any order.
HVC_RULE uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }
HVC_RULE uint64_t magnitude_bits(double x) { return bit_cast<uint64_t>(x) & 0x7fffffffffffffffu; }
HVC_RULE double magnitude_of(uint32_t bits) { return bit_cast<float>(bits); }
HVC_RULE double magnitude_of(uint64_t bits) { return bit_cast<double>(bits); }
template <class W> using MagnitudeBits = decltype(magnitude_bits(W(0)));

// The power of two that takes the largest magnitude of a line to [1, 4); 0 for a line of zeros, and for one that is
// not finite. Multiplying by it rounds nothing.
HVC_RULE double unit_scale(double largest) {
  const int exponent = int(bit_cast<uint64_t>(largest) >> 52 & 0x7ff);
  if (largest == 0 || exponent == 0x7ff) return 0;
  const int inverse = 2046 - exponent;
  return bit_cast<double>(uint64_t(inverse < 1 ? 1 : inverse) << 52);
}

// Element `index` of a stream of numbers in [-1, 1), multiples of 2^-23.
HVC_RULE float uniform(const Stream& stream, int64_t index) {
  const uint64_t word = random_word(stream, index >> 1, 0);
  return float(int32_t(uint32_t(index & 1 ? word >> 32 : word)) >> 8) * 0x1p-23f;
}

// What a line is multiplied by to become one of norm 1, or 0 if it depends on the lines before: `before` and `after`
// are its squared norms before and after what those span was taken out.
template <class W> HVC_RULE double normalising(double before, double after) {
  return after > kDependent<W> * kDependent<W> * before ? 1 / sqrt(after) : 0;
}

// What a product may be, so that the result is a number of the gradient's type; what is cut off stays in the residual.
template <class T> HVC_RULE Work<T> most_sent(double scale) {
  constexpr double kLargestHalf = 65504;
  if (!std::is_same<T, Half>::value) return infinity<Work<T>>;
  return Work<T>(scale > 1 ? kLargestHalf / scale : kLargestHalf);
}

}  // namespace hvc
