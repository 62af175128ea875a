// Records: one scale for a block of elements, and a sign for each of them.
//
//   record   scale, float32 (4 bytes), then block / 8 bytes: bit j of byte i is element 8 i + j, 1 is +scale, 0 -scale
//   block    a multiple of 64 elements; the last one of a tensor may have fewer, its record then has padding bits 0
//   scale    kMean: the mean of |x|; kRoot: the root of the mean of x^2, over the elements that there are; at most the
//            largest float32. kShared, of a fold only: the mean of the parts' scales, added in their order
//
// The sums are float64: element i of a block goes to lane i mod 32, a lane adds in order from 0, and the 32 lanes are
// combined as in rules/tree.h.
#pragma once
#include <cmath>

#include "rules/golomb.h"
#include "rules/kept.h"
#include "rules/sign.h"
#include "rules/tree.h"

namespace hvc {

enum ScaleRule : int { kMean = 0, kRoot = 1, kShared = 2 };

constexpr int64_t kScaleBytes = 4;
constexpr double kLargestScale = 0x1.fffffep127;

HVC_RULE int64_t record_bytes(int64_t block) { return kScaleBytes + block / 8; }

// NaN gives the largest scale too: what a record holds is always a number.
HVC_RULE float record_scale(ScaleRule rule, double sum, int64_t count) {
  const double mean = sum / double(count), scale = rule == kRoot ? sqrt(mean) : mean;  // kShared: count parts
  return scale <= kLargestScale ? float(scale) : float(kLargestScale);
}

HVC_RULE float scale_of_record(const uint8_t* record) { return bit_cast<float>(load_bytes<uint32_t>(record)); }

}  // namespace hvc
