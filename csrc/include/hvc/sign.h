// The one-bit rules. Bit 1 stands for +step, bit 0 for -step.
#pragma once
#include "hvc/half.h"

namespace hvc {

// What a rank keeps: x minus the decoded value of the consensus bits (global), x minus the decoded value of its own
// bits (own), x itself (momentum), or nothing.
enum Feedback : int { kFeedbackNone = 0, kFeedbackGlobal = 1, kFeedbackOwn = 2, kFeedbackMomentum = 3 };

// NaN is bit 0, and both zeros count as zero: defined by comparison, not by the sign bit.
template <class W> HVC_RULE bool sign_bit(W x) { return x >= 0; }

template <class W> HVC_RULE W signed_step(bool bit, W step) { return bit ? step : -step; }
template <class W> HVC_RULE W magnitude(W x) { return x < 0 ? -x : x; }

}  // namespace hvc
