// Plain numbers: the type in which two are multiplied, and how large they may get where they are kept.
#pragma once
#include "rules/half.h"

namespace hvc {

// float64 as soon as one side is float64.
template <class A, class B> struct WiderOf {
  using type = float;
};
template <class B> struct WiderOf<double, B> {
  using type = double;
};
template <class A> struct WiderOf<A, double> {
  using type = double;
};
template <> struct WiderOf<double, double> {
  using type = double;
};
template <class A, class B> using Wider = typename WiderOf<A, B>::type;

// What is kept with momentum stays where it cannot pass the largest number when it is next added to: it could not be
// brought back from infinity.
template <class W> constexpr W most_kept = W(0x1p126);
template <> inline constexpr double most_kept<double> = 0x1p1022;

}  // namespace hvc
