// Adam's second moment, set so that the optimizer's own step divides by what is held.
#pragma once
#include "hvc/half.h"

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

// What to give to Adam: it adds (1 - b2) grad^2 to b2 times this, and then has (1 - b2^t) d^2. Here d^2 is `square`, at
// least `floor`, or more where the first moment would move an element by more than `bound` learning rates. It may be
// less than nothing, but not by more than `taken` of what Adam adds. Every operation is rounded by itself.
template <class W> HVC_RULE W adam_held(W first, W grad, W square, W floor, const AdamScales<W>& s) {
  const W change = s.share * (grad - first);
  const W least = s.least * (first + change);
  const W bounded = least * least;
  W d = floor > square ? floor : square;
  d = bounded > d ? bounded : d;
  const W wanted = s.wanted * d, coming = s.coming * (grad * grad);
  const W second = wanted - coming, off = s.taken * coming;
  const W below = kTiny<W> - off, lowest = below < 0 ? below : W(0);
  return second > lowest ? second : lowest;
}

}  // namespace hvc
