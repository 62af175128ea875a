// QSGD: codes of `bits` bits on a scale of their own for every block of elements.
//
//   block   a multiple of 64 elements of a tensor, at most kMostBlock; the last one of a tensor may be shorter
//   norm    float32, whatever the gradient is: the largest |x| of the block, or the root of the sum of squares
//   code    a whole number of `bits` bits in two's complement: x / norm * s rounded up or down at random
//   record  the norm, then the codes of a whole block, element i at the bits from bits * i on, the lowest first;
//           codes past the end of a tensor are 0
//
// with s = 2^(bits-1) - 1 levels.
#pragma once
#include "rules/uniform.h"
#include "rules/norm.h"
#include "rules/pack.h"

#include <cmath>
#include <limits>

namespace hvc {

constexpr int64_t kMostBlock = 8192;

constexpr int64_t kNormBytes = 4;

HVC_RULE int64_t record_bytes(int64_t block, int bits) { return kNormBytes + block / 8 * bits; }
HVC_RULE int32_t levels_of(int bits) { return (1 << (bits - 1)) - 1; }

constexpr float kLargestNorm = std::numeric_limits<float>::max();

// The next float32 that is no smaller, and finite: a larger norm only makes levels wider, a smaller one would cut
// values off.
HVC_RULE float norm_at_least(double norm) {
  const float nearest = norm < double(kLargestNorm) ? float(norm) : kLargestNorm;
  return double(nearest) < norm && nearest < kLargestNorm ? bit_cast<float>(bit_cast<uint32_t>(nearest) + 1u) : nearest;
}

// The root of a sum of squares; squares of small numbers may have vanished.
HVC_RULE float norm_from_squares(double squares, double largest) {
  const double root = sqrt(squares);
  return norm_at_least(root > largest ? root : largest);
}

// ---- the mean of blocks -----------------------------------------------------------------------------------

// Blocks are added in units of their own norms / s, times a power of two that keeps them normal numbers.
HVC_RULE float power_for(float largest_norm) { return scaling_for(largest_norm, 1.0f).power; }
HVC_RULE float fold_unit(float norm, float power, int32_t levels) { return (norm * power) / float(levels); }

// The norm of a sum, no larger than what the mean may have, and that of the mean.
HVC_RULE float bounded_sum_norm(float norm, float power, int64_t ranks) {
  const float most = (kLargestNorm * power) * float(ranks);
  return norm < most ? norm : most;
}
HVC_RULE float mean_norm(float sum_norm, float power, int64_t ranks) {
  const float mean = (sum_norm / float(ranks)) / power;
  return mean < kLargestNorm ? mean : kLargestNorm;
}

}  // namespace hvc
