// SGD's step, with momentum or without.
#pragma once
#include "rules/half.h"

namespace hvc {

// Equal for all elements of a step; see sgd_moved in lanewise.h.
template <class W> struct SgdStep {
  W by;        // what the gradient counts times: -1 where the step climbs
  W decay;     // weight decay, which enters the gradient
  W momentum;  // how much of the buffer stays
  W share;     // 1 - dampening
  W rate;
  bool nesterov;

  template <class To> SgdStep<To> as() const {
    return {To(by), To(decay), To(momentum), To(share), To(rate), nesterov};
  }
};

template <class V> struct SgdMoved {
  V weight, buffer;
};

}  // namespace hvc
