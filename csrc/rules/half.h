// float16 and bfloat16 conversions by integer arithmetic: round to nearest even, subnormals kept, NaN stays
// NaN with the payload that F16C gives. No float operation here depends on a subnormal float32, so a flush-to-zero
// mode of the caller changes nothing.
#pragma once
#include "rules/common.h"

namespace hvc {

// Bits of one type as those of the other, in the low 16 of 32. U is uint32_t or a vector of them, F a float or those.

template <class F, class U> HVC_RULE U float_of_half(U half) {
  const U sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu, zero = half ^ half;
  const U quiet = magnitude > 0x7c00u ? zero + 0x00400000u : zero;
  const U normal = (magnitude << 13) + (112u << 23);
  const U special = (magnitude << 13) | quiet | 0x7f800000u;
  // Between 0.5 and 1 the last bit of a float is that of a half subnormal.
  const U subnormal = bit_cast<U>(F(bit_cast<F>(U(magnitude + 0x3f000000u)) - 0.5f));
  const U finite = magnitude < 0x0400u ? subnormal : normal;
  return (magnitude >= 0x7c00u ? special : finite) | sign;
}

template <class F, class U> HVC_RULE U bfloat16_of_float(U bits) {
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = (bits >> 16) | 0x0040u;
  const F value = bit_cast<F>(bits);
  return value != value ? nan : rounded;  // AVX2 has no comparison of unsigned integers
}

template <class F, class U> HVC_RULE U half_of_float(U all) {
  const U sign = (all >> 16) & 0x8000u, bits = all & 0x7fffffffu;
  // Adding 0.5 aligns the last bit of a half subnormal with the last bit of the float: the adder rounds for us.
  const U subnormal = bit_cast<U>(F(bit_cast<F>(bits) + 0.5f)) - 0x3f000000u;
  const U normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const U nan = ((bits >> 13) & 0x3ffu) | 0x7e00u;
  const U large = bits > 0x7f800000u ? nan : (bits ^ bits) + 0x7c00u;
  const U finite = bits < (113u << 23) ? subnormal : normal;
  return (bits >= (143u << 23) ? large : finite) | sign;
}

HVC_RULE float to_float(BFloat16 h) { return bit_cast<float>(uint32_t(h.bits) << 16); }
HVC_RULE float to_float(Half h) { return bit_cast<float>(float_of_half<float>(uint32_t(h.bits))); }
HVC_RULE BFloat16 to_bfloat16(float value) { return {uint16_t(bfloat16_of_float<float>(bit_cast<uint32_t>(value)))}; }
HVC_RULE Half to_half(float value) { return {uint16_t(half_of_float<float>(bit_cast<uint32_t>(value)))}; }

// float64 to float32 rounded to odd: a second rounding to a narrower type then gives what one rounding would. NaN has
// no sign and one payload: what is left of them in narrowing depends on the processor.
HVC_RULE float round_to_odd(double value) {
  const float nearest = float(value);
  const double wide = double(nearest);
  const uint32_t bits = bit_cast<uint32_t>(nearest);
  const double magnitude = value < 0 ? -value : value, wide_magnitude = wide < 0 ? -wide : wide;
  const uint32_t toward_zero = wide_magnitude > magnitude ? bits - 1u : bits;
  return bit_cast<float>(wide == value ? bits : value == value ? toward_zero | 1u : 0x7fffffffu);
}

// to_work: element to arithmetic type. from_work: arithmetic type to element.
HVC_RULE float to_work(float v) { return v; }
HVC_RULE double to_work(double v) { return v; }
HVC_RULE float to_work(Half v) { return to_float(v); }
HVC_RULE float to_work(BFloat16 v) { return to_float(v); }

template <class T> struct FromWork;
template <> struct FromWork<float> {
  static HVC_RULE float cast(float v) { return v; }
  static HVC_RULE float cast(double v) { return float(v); }
};
template <> struct FromWork<double> {
  static HVC_RULE double cast(float v) { return v; }
  static HVC_RULE double cast(double v) { return v; }
};
template <> struct FromWork<Half> {
  static HVC_RULE Half cast(float v) { return to_half(v); }
  static HVC_RULE Half cast(double v) { return to_half(round_to_odd(v)); }
};
template <> struct FromWork<BFloat16> {
  static HVC_RULE BFloat16 cast(float v) { return to_bfloat16(v); }
  static HVC_RULE BFloat16 cast(double v) { return to_bfloat16(round_to_odd(v)); }
};
template <class T, class W> HVC_RULE T from_work(W v) { return FromWork<T>::cast(v); }

// Finite means: exponent bits not all ones. Integer tests survive every compiler flag.
HVC_RULE bool is_finite(float v) { return (bit_cast<uint32_t>(v) & 0x7f800000u) != 0x7f800000u; }
HVC_RULE bool is_finite(double v) { return (bit_cast<uint64_t>(v) & 0x7ff0000000000000u) != 0x7ff0000000000000u; }
HVC_RULE bool is_finite(Half v) { return (v.bits & 0x7c00u) != 0x7c00u; }
HVC_RULE bool is_finite(BFloat16 v) { return (v.bits & 0x7f80u) != 0x7f80u; }

template <class W> constexpr W infinity = W(__builtin_inf());

// The smallest magnitude that from_work<T> rounds to infinity: half a unit above the largest number of T.
template <class T, class W> constexpr W overflow_bound = infinity<W>;
template <> inline constexpr double overflow_bound<float, double> = 0x1.ffffffp127;
template <class W> constexpr W overflow_bound<Half, W> = W(65520);
template <class W> constexpr W overflow_bound<BFloat16, W> = W(0x1.ffp127);

}  // namespace hvc
