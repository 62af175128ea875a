// Finite numbers that are too large to be taken in where signs or factors stand for elements. Such methods send little
// of one element in a step: a huge value would wait for very many of them, or let every sum it is in overflow.
//
// x = gradient + what is kept counts as not finite from 2^96 on, 7.9e28, in float64 too, as steps and scales travel as
// float32. Sums of 2^31 smaller ones are finite. Where what decoding leaves may be larger than x it is cut at half of
// that, so that no bucket is refused for what earlier ones left.
#pragma once
#include "rules/half.h"
#include "rules/philox.h"

namespace hvc {

template <class W> constexpr W too_large = W(0x1p96);
template <class W> constexpr W most_left = W(0x1p95);

// What is kept may be of 16 bits: bfloat16, rounded at random, up as often as what is cut off is a part of a unit. So
// it is right on average, and exact where it fits. The 16 random bits of an element are the upper ones of its number in
// the bucket, multiplied and moved by two constants of a stream: each draw is uniform, and any two are as good as
// independent over the steps, which have other constants. So means and variances of sums are those of independent
// draws, at the price of an addition and a shift. More than two are not: for one factor in some hundreds, neighbours
// are mostly rounded the same way in that step.
struct KeptDraws {
  uint32_t factor, moved;
};
HVC_RULE KeptDraws draws_for(const Stream& s) {
  return {uint32_t(random_word(s, 0, 0)) | 1u, uint32_t(random_word(s, 1, 0))};
}

// The bits of a float as those of bfloat16, in the low 16 of 32; `place` is the number of its element, multiplied and
// moved. U is uint32_t or a vector of them. Nothing is added to what would be too large then, and NaN stays one, as
// arithmetic makes no other than quiet ones.
template <class U> HVC_RULE U short_bits(U bits, U place) {
  const U draw = (bits & 0x7fffffffu) >= 0x6f7f0000u ? bits ^ bits : place >> 16;
  return (bits + draw) >> 16;
}

// What is rounded from there; a double near the limit would become it.
HVC_RULE float kept_float(float x) { return x; }
HVC_RULE float kept_float(double x) {
  const double most = 0x1.fffffep95;
  return float(x > most ? most : x < -most ? -most : x);
}

}  // namespace hvc
