// Standard dithering: evenly spaced levels. A code is a whole number of 2 to 8 or of 16 bits in two's complement, and
// codes add. Those below 8 bits are packed; with four, the even element of two is low.
#pragma once
#include "rules/dither.h"
#include "rules/pack.h"

namespace hvc {

// NaN is the limit: such buckets are thrown away. A GPU's instructions take the number of a number and NaN.
template <class W> HVC_RULE W cut_off(W z, W limit) {
#if defined(__CUDA_ARCH__)
  return max(min(z, limit), -limit);
#else
  const W low = z < limit ? z : limit;
  return low > -limit ? low : -limit;
#endif
}

// `z` is x in units of 2^-16 levels, `limit` the largest level in them: floor(z + u) in steps of 2^16.
HVC_RULE int32_t level_of(float z, float limit, uint32_t random) {
  return (nearest(cut_off(z, limit)) + int32_t(random)) >> kDrawBits;
}

HVC_RULE float level_limit(int32_t levels) { return float(levels) * 65536.0f; }

// The limit where |x| counts as `bound` at most; the norm 0 and an infinite bound change nothing.
template <class W> HVC_RULE float bounded_limit(float limit, W bound, const Scaling<W>& s) {
  const float bounded = scaled(bound, s);
  return bounded < limit ? bounded : limit;
}

HVC_RULE int32_t even_nibble(uint8_t both) { return int8_t(uint8_t(both << 4)) >> 4; }
HVC_RULE int32_t odd_nibble(uint8_t both) { return int8_t(both) >> 4; }

// Two four-bit sums in one byte: the top bits are added apart, so that no carry crosses.
HVC_RULE uint8_t add_nibbles(uint8_t a, uint8_t b) { return uint8_t(((a & 0x77u) + (b & 0x77u)) ^ ((a ^ b) & 0x88u)); }

}  // namespace hvc
