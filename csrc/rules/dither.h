// What both kinds of dithering share: scaling by a norm, and 16 random bits for each element.
#pragma once
#include "rules/half.h"
#include "rules/philox.h"

namespace hvc {

// Element e of a stream takes 16 bits, the lowest first: bits 16 (e mod 4) to 16 (e mod 4) + 15 of word e / 4.
constexpr int kDrawBits = 16;
constexpr int kDrawsPerWord = 4, kDrawsPerGroup = 8;

// Draws that are all 1/2: what is rounded by them is rounded to the nearest.
constexpr uint32_t kHalf = 1u << (kDrawBits - 1);
HVC_RULE Stream halves() { return {0, 0, 0, 0, 0, kHalf, false}; }
HVC_RULE Stream draws_of(const Stream* key) { return key ? *key : halves(); }

// Adds numbers of 16 bits, two at once.
HVC_RULE uint32_t add_halves(uint32_t a, uint32_t b) {
  return ((a & 0x7fff7fffu) + (b & 0x7fff7fffu)) ^ ((a ^ b) & 0x80008000u);
}

// x * (target / norm) in two factors, so that neither leaves the normal numbers whatever the norm is.
template <class W> struct Scaling {
  W power, factor;
};

template <class W> constexpr W kFar = W(0x1p64);
template <> inline constexpr double kFar<double> = 0x1p512;

// The norm 0 gives 0 for every element.
template <class W> HVC_RULE Scaling<W> scaling_for(W norm, W target) {
  constexpr W kNear = W(1) / kFar<W>;
  const W power = norm < kNear ? kFar<W> : norm > kFar<W> ? kNear : W(1);
  return {power, norm > 0 ? target / (norm * power) : W(0)};
}

// Codes are made of float32 whatever the gradient is: they hold far fewer digits.
template <class W> HVC_RULE float scaled(W x, const Scaling<W>& s) { return float((x * s.power) * s.factor); }

// What a code stands for: `factor` is a level or a power of two. In this order a subnormal norm loses nothing.
template <class Factor, class W> HVC_RULE W decoded(Factor factor, W scale, W norm) {
  return (W(factor) * scale) * norm;
}

// To the nearest integer, ties to even; the value fits.
HVC_RULE int32_t nearest(float value) {
#if defined(__CUDA_ARCH__)
  return __float2int_rn(value);
#else
  return int32_t(__builtin_rintf(value));
#endif
}

}  // namespace hvc
