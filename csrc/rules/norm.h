// The norm of consecutive elements: the largest |x|, or the sum of |x|^p for p = 1, 2 or 4. These powers need no
// libm. Values that are not finite count as 0 here; they are counted apart.
#pragma once
#include "rules/half.h"

namespace hvc {

// What a norm adds up; kMaximum is no sum.
enum Power : int { kMaximum = 0, kPower1 = 1, kPower2 = 2, kPower4 = 4 };

// The bits of an element as a signed integer: magnitudes are ordered like their bits.
template <class T> struct BitsOf {
  using type = int16_t;
};
template <> struct BitsOf<float> {
  using type = int32_t;
};
template <> struct BitsOf<double> {
  using type = int64_t;
};
template <class T> using Bits = typename BitsOf<T>::type;

template <class T> constexpr Bits<T> kInfinityBits = 0;
template <> inline constexpr int32_t kInfinityBits<float> = 0x7f800000;
template <> inline constexpr int64_t kInfinityBits<double> = 0x7ff0000000000000;
template <> inline constexpr int16_t kInfinityBits<Half> = 0x7c00;
template <> inline constexpr int16_t kInfinityBits<BFloat16> = 0x7f80;

template <class T> HVC_RULE Bits<T> magnitude_bits(T value) {
  constexpr uint64_t kAllButSign = ~uint64_t(0) >> (65 - 8 * sizeof(T));
  return Bits<T>(bit_cast<Bits<T>>(value) & Bits<T>(kAllButSign));
}

// |x|^p in float64; 0 for what is not finite. A mask and no choice: loops over this are vectors.
template <Power kPower, class T> HVC_RULE double power_of(T value) {
  const Bits<T> bits = magnitude_bits(value);
  const auto a = double(to_work(bit_cast<T>(Bits<T>(bits & -Bits<T>(bits < kInfinityBits<T>)))));
  return kPower == kPower1 ? a : kPower == kPower2 ? a * a : (a * a) * (a * a);
}

}  // namespace hvc
