// The one-bit rules, of which lanewise.h has the rest. Bit 1 stands for +step, bit 0 for -step.
#pragma once
#include "rules/half.h"

namespace hvc {

// What a rank keeps: x minus the decoded value of the consensus bits (global), x minus the decoded value of its own
// bits (own), x itself (momentum), or nothing.
enum Feedback : int { kFeedbackNone = 0, kFeedbackGlobal = 1, kFeedbackOwn = 2, kFeedbackMomentum = 3 };

}  // namespace hvc
