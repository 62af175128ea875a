// The one order in which |x| is summed, so that the result is the same for every thread count, vector width and
// device.
//
//   row          consecutive elements that share a step
//   superblock   64 blocks of a row, counted from the row's start: added in index order, float64, from 0
//   block        1024 elements of a row, counted from the row's start
//   lane         inside a block element i goes to lane i mod 32; a lane adds its elements in index order in the
//                arithmetic type (float32; float64 for float64 data), from 0
//
// The 32 lanes are combined pairwise, lane i with lane i + 16, then + 8, + 4, + 2, + 1: what a warp does with
// shuffles and a vector unit with halves. Absent elements of a short block count as 0, which changes no sum of
// magnitudes. Superblocks of a row are added in index order, float64, from 0. A NaN result is the canonical one.
#pragma once
#include "rules/common.h"

namespace hvc {

constexpr int kLanes = 32;
constexpr int64_t kBlock = 1024;
constexpr int64_t kSuperblock = 64 * kBlock;

template <class W> HVC_RULE W combine_lanes(W* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

HVC_RULE double canonical(double sum) { return sum == sum ? sum : bit_cast<double>(uint64_t(0x7ff8000000000000u)); }

// What a row's sum of |x| is as a step: a rank's share in the mean over so many ranks of the mean of |x|, times a
// scale.
HVC_RULE float step_of(double sum, int64_t elements, int64_t ranks, float scale) {
  const double mean = sum / double(elements * ranks);
  const float step = float(mean) * scale;
  return step == step ? step : bit_cast<float>(uint32_t(0x7fc00000u));
}

}  // namespace hvc
