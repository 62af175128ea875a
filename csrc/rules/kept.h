// Finite numbers that are too large to be taken in where signs or factors stand for elements. Such methods send little
// of one element in a step: a huge value would wait for very many of them, or let every sum it is in overflow.
//
// x = gradient + what is kept counts as not finite from 2^96 on, 7.9e28, in float64 too, as steps and scales travel as
// float32. Sums of 2^31 smaller ones are finite. Where what decoding leaves may be larger than x it is cut at half of
// that, so that no bucket is refused for what earlier ones left.
#pragma once
#include "rules/half.h"

namespace hvc {

template <class W> constexpr W too_large = W(0x1p96);
template <class W> constexpr W most_left = W(0x1p95);

}  // namespace hvc
