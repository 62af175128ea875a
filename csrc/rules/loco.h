// LoCo: codes of a gradient and a fading average of earlier errors, rounded to the nearest; and what is kept.
//
//   p     gradient + kept; of an owner, the mean of what all ranks sent + kept
//   code  p / norm * s to the nearest level, in records as rules/qsgd.h describes them
//   left  beta * kept + (1 - beta) * (p - what the code stands for), in such records of their own: as many bits as one
//         says, the norm is the largest magnitude, to the nearest level too. What p has beyond the norm, as only
//         float64 may, is lost.
#pragma once
#include "rules/qsgd.h"

namespace hvc {

// How errors are averaged and kept.
struct ErrorRule {
  int bits;
  double beta;
};

template <class W> HVC_RULE W averaged_error(double beta, W kept, W x, W norm, W sent) {
  return W(beta) * kept + W(1.0 - beta) * (cut_off(x, norm) - sent);
}

// What a level stands for, of s.
template <class W> HVC_RULE W unit_of(int bits) { return W(1.0 / double(levels_of(bits))); }

// What an owner kept counts for in the sum over ranks.
HVC_RULE float weight_of_kept(float power, int64_t ranks) { return power * float(ranks); }

}  // namespace hvc
