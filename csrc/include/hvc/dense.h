// The uncompressed rules: offer, add and decode of plain numbers.
#pragma once
#include "hvc/half.h"

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

template <class T> HVC_RULE T dense_sum(T a, T b) { return from_work<T>(to_work(a) + to_work(b)); }

template <class Out, class In> HVC_RULE Out dense_scaled(In value, Wider<In, Out> scale) {
  return from_work<Out>(Wider<In, Out>(to_work(value)) * scale);
}

// Two operations, each rounded.
template <class W> HVC_RULE W with_momentum(W factor, W momentum, W grad) {
  const W product = factor * momentum;
  return product + grad;
}

// What is kept with momentum stays where it cannot pass the largest number when it is next added to: it could not be
// brought back from infinity.
template <class W> constexpr W most_kept = W(0x1p126);
template <> inline constexpr double most_kept<double> = 0x1p1022;

template <class W> HVC_RULE W bounded(W x) {
  return x > most_kept<W> ? most_kept<W> : x < -most_kept<W> ? -most_kept<W> : x;
}

}  // namespace hvc
