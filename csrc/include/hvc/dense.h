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

}  // namespace hvc
