// The last level of the tree of rules/tree.h: sums of rows from those of their superblocks.
#pragma once
#include "rules/tree.h"

namespace hvc {

// The first superblock of a row is copied: `unit_sums` may be `sums` where rows have one each.
inline void add_superblocks(const Units& units, const double* unit_sums, double* sums) {
  for (int64_t unit = 0; unit < units.total; ++unit) {
    double& sum = sums[unit / units.per_row];
    sum = canonical(unit % units.per_row == 0 ? unit_sums[unit] : sum + unit_sums[unit]);
  }
}

}  // namespace hvc
