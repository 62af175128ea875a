// Adam's step that divides by a second moment that is held: what to give to its own formula, and all of it.
#pragma once
#include "rules/half.h"

namespace hvc {

// Equal for all elements of a step t, with Adam's betas b1, b2:
template <class W> struct AdamScales {
  W share;   // 1 - b1
  W least;   // 1 / ((1 - b1^t) bound)
  W wanted;  // (1 - b2^t) / b2
  W coming;  // (1 - b2) / b2
  W taken;   // how much of that may be taken off beforehand
};

// Of a whole step t that divides by what is held; see adam_moved in lanewise.h.
template <class W> struct AdamStep {
  W by;       // what the gradient counts times: -1 where the step climbs
  W coupled;  // weight decay that enters the gradient
  W kept;     // 1 - lr decay where it does not
  W share;    // 1 - b1 from the first moment on; from the gradient on it is -b1
  bool from_grad;
  W least;   // 1 / ((1 - b1^t) bound)
  W coming;  // (1 - b2) / (1 - b2^t)
  W rate;    // lr / (1 - b1^t)
  W eps;

  template <class To> AdamStep<To> as() const {
    return {To(by), To(coupled), To(kept), To(share), from_grad, To(least), To(coming), To(rate), To(eps)};
  }
};

template <class V> struct AdamMoved {
  V weight, first;
};

// Squares below this are rounded too coarsely for a part to be taken away.
template <class W> constexpr W kTiny = W(1e-30);

}  // namespace hvc
