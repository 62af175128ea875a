// Adam's second moment, set so that the optimizer's own step divides by what is held.
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

// Squares below this are rounded too coarsely for a part to be taken away.
template <class W> constexpr W kTiny = W(1e-30);

}  // namespace hvc
