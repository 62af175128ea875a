// Exponential dithering: levels that are powers of two. A code of `bits` = 8 or 4 bits is a sign, the top bit, and an
// exponent e: it stands for +-norm 2^(headroom - e), and e = 0 for zero. |x| = norm is e = headroom; the codes below
// it are for sums. Merging a balanced tree of depth headroom - 1 therefore never reaches e = 0.
//
// With a mantissa of m bits, 2^m evenly spaced levels begin at each power of two: small floating-point numbers. Then e
// counts levels: e = headroom + k 2^m stands for norm 2^-k. Such codes are folded, but not merged.
#pragma once
#include <type_traits>

#include "rules/dither.h"

namespace hvc {

// Elements smaller than norm 2^-96 are rounded to that or to 0: what is left of float32's exponents is for scaling.
constexpr int kExponents = 96;
// Codes have a mantissa of so many bits, or none.
constexpr int kMantissaBits = 2;

// How elements become codes.
struct PowersOfTwo {
  int32_t headroom, smallest;  // the exponents of the norm and of the smallest level, which is a power of two
  uint32_t smallest_bits;      // the smallest level relative to the norm, as bits of float32
  float stretch;               // makes the smallest level 2^16
};

HVC_RULE PowersOfTwo powers_for(int bits, int headroom, int mantissa) {
  const int octaves = ((1 << (bits - 1)) - 1 - headroom) >> mantissa;
  const int below = octaves < kExponents ? octaves : kExponents;
  return {headroom, headroom + (below << mantissa), uint32_t(127 - below) << 23,
          bit_cast<float>(uint32_t(127 + kDrawBits + below) << 23)};
}

// `z` is x / norm. Adding random bits below those that are kept carries into them with the probability that makes the
// two neighbouring levels unbiased. Below the smallest level the neighbours are it and 0. NaN counts as 1: its sign is
// no result, as processors give it one or another.
template <int kMantissa>
HVC_RULE uint32_t exponential_of(float z, const PowersOfTwo& o, uint32_t sign_bit, uint32_t random) {
  const uint32_t size = bit_cast<uint32_t>(z) & 0x7fffffffu;
  const uint32_t a = size < 0x3f800000u ? size : 0x3f800000u;
  constexpr int kDropped = 23 - kMantissa, kBelow = kDropped - kDrawBits;  // of float32's bits; fewer are drawn
  const uint32_t drawn = a + (random << kBelow) + (1u << (kBelow - 1));
  const uint32_t large = (127u << kMantissa) + uint32_t(o.headroom) - (drawn >> kDropped);
  // Masks and no branches: loops over this are vectors.
  const uint32_t below = 0u - uint32_t(a < o.smallest_bits);
  const uint32_t chance = uint32_t(nearest(bit_cast<float>(a & below) * o.stretch));
  const uint32_t small = uint32_t(o.smallest) & (0u - uint32_t(random < chance));
  const uint32_t e = (below & small) | (~below & large);
  return e | (sign_bit & (0u - (uint32_t(e != 0u) & uint32_t(z < 0))));
}

// The factor of a code, to be multiplied by 1 / ranks and then by the norm: a subnormal norm loses nothing so.
template <int kMantissa> HVC_RULE float exponential_value(uint32_t code, uint32_t sign_bit, int32_t headroom) {
  const uint32_t e = code & (sign_bit - 1u);
  const uint32_t bits = (127u << kMantissa) + uint32_t(headroom) - e;
  return bit_cast<float>(e == 0u ? 0u : bits << (23 - kMantissa) | ((code & sign_bit) != 0u ? 0x80000000u : 0u));
}

// What is true of a number, or where of a vector: a mask of all ones. A GPU has registers of one bit for such answers,
// and masks would cost it twice the instructions.
template <class V> HVC_RULE auto where_less(const V& a, const V& b) {
  if constexpr (std::is_integral_v<V>)
    return a < b;
  else
    return (V)(a < b);
}
template <class V> HVC_RULE auto where_equal(const V& a, const V& b) {
  if constexpr (std::is_integral_v<V>)
    return a == b;
  else
    return (V)(a == b);
}
template <class V> using Where = decltype(where_less(V(), V()));

template <class V> HVC_RULE V choose_bits(const Where<V>& mask, const V& yes, const V& no) {
  if constexpr (std::is_integral_v<V>)
    return mask ? yes : no;
  else
    return (mask & yes) | (~mask & no);
}

// What two codes have to do with each other. The exponents are e1 <= e2, D = e2 - e1.
template <class V> struct ExponentialPair {
  V larger, e1;  // `larger` is the code with e1, that of the larger number
  Where<V> equal_signs, cancelled;
  V trials;      // how many random bits must be 0 for a step of the exponent,
  Where<V> few;  // if that is below 16, else 0 and no step
};

template <class V> HVC_RULE ExponentialPair<V> exponential_pair(const V& a, const V& b, const V& sign_bit) {
  const V zero = a ^ a, one = V(zero + 1), exponents = sign_bit - one;
  const V ea = a & exponents, eb = b & exponents;
  const Where<V> b_larger = where_less(eb, ea);
  const V larger = choose_bits(b_larger, b, a);
  const V distance = choose_bits(b_larger, V(ea - eb), V(eb - ea));
  const Where<V> equal_signs = where_equal(V((a ^ b) & sign_bit), zero);
  const V trials = distance - choose_bits(equal_signs, zero, one);
  const Where<V> few = where_less(trials, V(one << 4));
  // Equal numbers of opposite signs have -1 trials.
  const Where<V> cancelled = where_equal(V(trials + one), zero);
  return {larger, V(larger & exponents), equal_signs, cancelled, choose_bits(few, trials, zero), few};
}

// One code for the sum of two, without bias but for exponents 16 or more apart, where the smaller one is
// dropped. Of equal signs e1 - 1 with probability 2^-D, else e1; of opposite signs e1 + 1 with probability 2^-(D-1),
// else e1, and zero where D = 0. The low D of 16 random bits decide; `power` is 2^trials.
template <class V> HVC_RULE V exponential_merge(const V& a, const V& b, const ExponentialPair<V>& p, const V& power,
                                                const V& random, const V& sign_bit) {
  const V zero = a ^ a, one = V(zero + 1), exponents = sign_bit - one;
  const Where<V> hit = where_equal(V(random & (power - one)), zero) & p.few;
  const V up = choose_bits(where_equal(p.e1, one), zero, V(zero - one));
  const V step = choose_bits(p.equal_signs, up, one);
  const V sum = choose_bits(p.cancelled, zero, V(p.larger + choose_bits(hit, step, zero)));
  const Where<V> a_zero = where_equal(V(a & exponents), zero), b_zero = where_equal(V(b & exponents), zero);
  return choose_bits(a_zero, b, choose_bits(b_zero, a, sum));
}

}  // namespace hvc
